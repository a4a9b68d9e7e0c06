"""Orders of jobs: what they take, hold, and are as a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..clock.activations import lifetimes
from ..jobs.job import Direction
from .ordering_problem import OrderingProblem

CLOSE = 1e-9  # of a worker's room: what sums of sizes may be off by
Orders = tuple[tuple[int, ...], ...]  # the numbers of each worker's jobs


class JobTimes(NamedTuple):
    """When jobs start and end, by number."""

    start: list[float]
    end: list[float]


def replay(problem: OrderingProblem, orders: Orders) -> JobTimes | None:
    """When jobs run in these orders, as early as possible; None if they never end."""
    jobs, preds = problem.jobs, problem.preds
    compute, kind = jobs.worker, jobs.kind
    start, end = [0.0] * len(jobs), [-1.0] * len(jobs)
    at, clock = [0] * len(orders), [0.0] * len(orders)
    waits: dict[int, list[int]] = {}  # workers, by the job that they wait for
    todo = list(range(len(orders)))
    while todo:
        w = todo.pop()
        order, now = orders[w], clock[w]
        for i in range(at[w], len(order)):
            j = order[i]
            for pred, delay in preds[j]:
                when = end[pred]
                if when < 0:
                    waits.setdefault(pred, []).append(w)
                    break
                if compute[pred] != w:
                    when += delay
                if when > now:
                    now = when
            else:
                start[j] = now
                end[j] = now = now + problem.seconds[kind[j]]
                clock[w] = now
                if j in waits:
                    todo += waits.pop(j)
                continue
            at[w] = i
            break
        else:
            at[w] = len(order)
    return None if waits else JobTimes(start, end)


def length(orders: Orders, times: JobTimes, objective: str) -> float:
    """What is to be short: the step, or the longest span of a worker."""
    span, (start, end) = objective != "latency", times
    return max(end[order[-1]] - span * start[order[0]] for order in orders if order)


def most(problem: OrderingProblem, order: Sequence[int]) -> float:
    """The most that a worker holds, if it runs its jobs in this order."""
    kind = problem.jobs.kind
    held = peak = 0.0
    for j in order:
        held += problem.takes[kind[j]]
        peak = max(peak, held)
        held -= problem.gives[kind[j]]
    return peak


def fits(problem: OrderingProblem, worker: int, order: Sequence[int]) -> bool:
    """Whether a worker has room for what an order holds."""
    room = problem.room[worker]
    return room == float("inf") or most(problem, order) <= room * (1 + CLOSE)


def ranks(
    problem: OrderingProblem, orders: Orders
) -> dict[tuple[int, int, Direction], int]:
    """n of every job: its place in the global order of starts."""
    times = replay(problem, orders)
    assert times is not None, "orders that were found come to an end"
    place = {j: i for order in orders for i, j in enumerate(order)}
    order = sorted(place, key=lambda j: (times.start[j], place[j]))
    last = (
        problem.jobs.microbatches - 1
    )  # what n is asked with for F of global-batch stages
    return {
        (s, last if joint and d is Direction.FORWARD else b, d): i
        for i, (s, b, d, joint) in enumerate(
            (*job, job.joint) for job in map(problem.jobs.job, order)
        )
    }


def caps(problem: OrderingProblem, orders: Orders) -> dict[int, int]:
    """By stage, the most microbatches in flight on a worker."""
    jobs = problem.jobs
    lives = lifetimes(jobs, problem.schedule.release)
    change = {life.release: -1 for life in lives} | {life.forward: 1 for life in lives}
    most_held = {jobs.kinds[life.forward][0]: 0 for life in lives}
    for order in orders:
        held = dict.fromkeys(most_held, 0)
        for j in order:
            kind = jobs.kind[j]
            if kind in change:
                stage = jobs.kinds[kind][0]
                held[stage] += change[kind]
                most_held[stage] = max(most_held[stage], held[stage])
    return most_held
