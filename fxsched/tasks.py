"""Jobs whose order is looked for, and what an order of them takes and holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import networkx as nx
import numpy as np

from .eventloop import Jobs, Kind, Timeline
from .jobs import Direction, Schedule
from .links import Link
from .stages import kind_seconds, stage_jobs

FORWARD, BACKWARD, WEIGHT = Direction
CLOSE = 1e-9  # of a worker's room: what sums of sizes may be off by
Orders = tuple[tuple[int, ...], ...]  # the numbers of each worker's jobs
Transfer = float | Link | None


class Times(NamedTuple):
    """When jobs start and end, by number."""

    start: list[float]
    end: list[float]


@dataclass(frozen=True)
class Task:
    """Jobs with their workers: F, B and W of a stage and microbatch have the same.

    schedule: where w comes from.
    seconds: how long a job of each kind takes.
    delays: how long from one kind's end to another, if on different workers.
    takes, gives: by kind, what a job's start takes of its worker's room for
        activations, and what its end gives back.
    room: of each worker.
    """

    schedule: Schedule
    jobs: Jobs
    seconds: tuple[float, ...]
    delays: dict[tuple[int, int], float]
    takes: tuple[float, ...]
    gives: tuple[float, ...]
    room: tuple[float, ...]

    @cached_property
    def succs(self) -> list[list[tuple[int, float]]]:
        """By kind, how far each successor is and what comes there from elsewhere."""
        found: list[list[tuple[int, float]]] = [[] for _ in self.seconds]
        for k, before in enumerate(self.jobs.preds):
            for p in before:
                found[p].append((k - p, self.delays.get((p, k), 0.0)))
        return found

    @cached_property
    def work(self) -> float:
        """Of the worker that has most to do, which no order is shorter than."""
        work = [0.0] * self.jobs.workers
        for j, worker in enumerate(self.jobs.compute):
            work[worker] += self.seconds[j % len(self.seconds)]
        return max(work)


def make_task(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    transfer: Transfer,
    kept: float,
    limit: float | None,
) -> Task | None:
    """The jobs of a schedule; None if F, B and W of a stage are on different workers,
    or the weights alone are above the limit.

    kept: the share of what F saves that is still there between B and W.
    """
    jobs = stage_jobs(schedule, stages)
    worker = np.asarray(jobs.compute).reshape(-1, len(jobs.kinds))
    holders = jobs.holders(schedule.release)
    for f, (b, last) in holders.items():
        if (worker[:, [b, last]] != worker[:, [f]]).any():
            return None
    takes, gives = _room(jobs.kinds, stages, schedule, kept)
    room = [float("inf")] * schedule.workers
    if limit is not None:
        room = [limit - held for held in weights(jobs, stages)]
        if min(room) < 0:
            return None
    seconds = tuple(kind_seconds(schedule, stages, jobs.kinds))
    delays = _delays(jobs, stages, transfer)
    return Task(schedule, jobs, seconds, delays, takes, gives, tuple(room))


def _room(
    kinds: Sequence[Kind], stages: nx.DiGraph[int], schedule: Schedule, kept: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What jobs take and give, by kind."""
    freed = {d for s, d in kinds}
    share = {FORWARD: 0.0, BACKWARD: 1.0, WEIGHT: 0.0}
    if schedule.split_backward and WEIGHT in freed:
        share = {FORWARD: 0.0, BACKWARD: 1 - kept, WEIGHT: kept}
    back = {s for s, d in kinds if d is schedule.release}
    size = [stages.nodes[s]["held"] * (s in back) for s, _ in kinds]
    takes = [x * (d is FORWARD) for x, (_, d) in zip(size, kinds, strict=True)]
    gives = [x * share[d] for x, (_, d) in zip(size, kinds, strict=True)]
    return tuple(takes), tuple(gives)


def _delays(
    jobs: Jobs, stages: nx.DiGraph[int], transfer: Transfer
) -> dict[tuple[int, int], float]:
    """What messages between kinds take; on a link, if no others are under way."""
    found = {}
    for k, before in enumerate(jobs.preds):
        for p in before:
            a, b = sorted((jobs.kinds[p][0], jobs.kinds[k][0]))
            if a == b:
                continue
            edge: dict[str, float] = stages.get_edge_data(a, b, {})
            if transfer is None:
                found[p, k] = edge.get("seconds", 0.0)
            elif isinstance(transfer, Link):
                size = edge.get("bytes", 0.0)
                found[p, k] = size / transfer.bandwidth + transfer.latency
            else:
                found[p, k] = transfer
    return found


def weights(jobs: Jobs, stages: nx.DiGraph[int]) -> list[float]:
    """What the weights that each worker keeps take."""
    found = [0.0] * jobs.workers
    of = [s for s, _ in jobs.kinds] * jobs.microbatches
    for stage, worker in sorted(set(zip(of, jobs.weights, strict=True))):
        found[worker] += stages.nodes[stage]["weights"]
    return found


def replay(task: Task, orders: Orders) -> Times | None:
    """When jobs run in these orders, as early as possible; None if they never end."""
    jobs, width = task.jobs, len(task.seconds)
    compute, preds, delays = jobs.compute, jobs.preds, task.delays
    start, end = [0.0] * len(jobs), [-1.0] * len(jobs)
    at, clock = [0] * len(orders), [0.0] * len(orders)
    waits: dict[int, list[int]] = {}  # workers, by the job that they wait for
    todo = list(range(len(orders)))
    while todo:
        w = todo.pop()
        order, now = orders[w], clock[w]
        for i in range(at[w], len(order)):
            j = order[i]
            k = j % width
            for p in preds[k]:
                pred = j + p - k
                when = end[pred]
                if when < 0:
                    waits.setdefault(pred, []).append(w)
                    break
                if compute[pred] != w:
                    when += delays.get((p, k), 0.0)
                if when > now:
                    now = when
            else:
                start[j] = now
                end[j] = now = now + task.seconds[k]
                clock[w] = now
                if j in waits:
                    todo += waits.pop(j)
                continue
            at[w] = i
            break
        else:
            at[w] = len(order)
    return None if waits else Times(start, end)


def length(orders: Orders, times: Times, objective: str) -> float:
    """What is to be short: the step, or the longest span of a worker."""
    start, end = times
    used = [order for order in orders if order]
    begin = 0.0 if objective == "latency" else None
    return max(
        end[order[-1]] - (start[order[0]] if begin is None else begin) for order in used
    )


def most(task: Task, order: Sequence[int]) -> float:
    """The most that a worker holds, if it runs its jobs in this order."""
    width = len(task.seconds)
    held = peak = 0.0
    for j in order:
        held += task.takes[j % width]
        peak = max(peak, held)
        held -= task.gives[j % width]
    return peak


def fits(task: Task, worker: int, order: Sequence[int]) -> bool:
    room = task.room[worker]
    return room == float("inf") or most(task, order) <= room * (1 + CLOSE)


def memory(
    schedule: Schedule, stages: nx.DiGraph[int], events: Timeline, kept: float
) -> list[float]:
    """The most that each worker holds: weights, gradients, and what F saves, of which
    only the share `kept` is still there between B and W; see stages.peaks."""
    jobs = events.jobs
    takes, gives = (np.array(x) for x in _room(jobs.kinds, stages, schedule, kept))
    width = len(jobs.kinds)
    far = np.zeros(width, int)
    for f, (b, last) in jobs.holders(schedule.release).items():
        far[f], far[last] = b - f, b - last
    order = np.asarray(events.order, int)
    kind = order % width
    place = np.asarray(jobs.compute, int)[order + far[kind]]
    change = takes[kind] - gives[kind]
    when = np.where(change > 0, np.asarray(events.start), np.asarray(events.end))
    found = weights(jobs, stages)
    by_time: Any = np.lexsort((change > 0, when))  # at one time, what goes goes first
    for worker in range(schedule.workers):
        mine = by_time[place[by_time] == worker]
        found[worker] += max(np.cumsum(change[mine]).max(initial=0.0), 0.0)
    return [float(held) for held in found]


def ranks(task: Task, orders: Orders) -> dict[tuple[int, int, Direction], int]:
    """n of every job: its place in the global order of starts."""
    times = replay(task, orders)
    assert times is not None, "orders that were found come to an end"
    place = {j: i for order in orders for i, j in enumerate(order)}
    order = sorted(place, key=lambda j: (times.start[j], place[j]))
    jobs = map(task.jobs.job, order)
    return {(s, b, d): i for i, (s, b, d) in enumerate(jobs)}


def caps(task: Task, orders: Orders) -> dict[int, int]:
    """By stage, the most microbatches in flight on a worker."""
    release, width = task.schedule.release, len(task.seconds)
    back = {s for s, d in task.jobs.kinds if d is release}
    found = dict.fromkeys(back, 0)
    for order in orders:
        held = dict.fromkeys(back, 0)
        for j in order:
            stage, direction = task.jobs.kinds[j % width]
            if stage in back:
                held[stage] += (direction is FORWARD) - (direction is release)
                found[stage] = max(found[stage], held[stage])
    return found
