"""Orders of a task's jobs: what they take, hold, and are as a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..jobs import Direction
from .ordering_problem import Task

FORWARD = Direction.FORWARD
CLOSE = 1e-9  # of a worker's room: what sums of sizes may be off by
Orders = tuple[tuple[int, ...], ...]  # the numbers of each worker's jobs


class Times(NamedTuple):
    """When jobs start and end, by number."""

    start: list[float]
    end: list[float]


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
