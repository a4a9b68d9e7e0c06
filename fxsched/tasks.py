"""Jobs whose order is looked for, and what workers hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import networkx as nx
import numpy as np

from .eventloop import Jobs, Kind, Timeline
from .jobs import Direction, Schedule
from .links import Link
from .stages import kind_seconds, stage_jobs

FORWARD, BACKWARD, WEIGHT = Direction
Transfer = float | Link | None


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
    def looped(self) -> bool:
        """Whether a worker has several stages."""
        stages = [s for s, _ in self.jobs.kinds] * self.jobs.microbatches
        pairs = set(zip(self.jobs.compute, stages, strict=True))
        return len(pairs) > len({worker for worker, _ in pairs})

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
    seconds = tuple(kind_seconds(stages, jobs.kinds))
    delays = _delays(jobs, stages, transfer)
    return Task(schedule, jobs, seconds, delays, takes, gives, tuple(room))


def _room(
    kinds: Sequence[Kind], stages: nx.DiGraph[int], schedule: Schedule, kept: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What jobs take and give, by kind."""
    b = 1.0 - kept if schedule.split_backward else 1.0
    share = {FORWARD: 0.0, BACKWARD: b, WEIGHT: kept}
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
