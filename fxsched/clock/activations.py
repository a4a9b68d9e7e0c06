"""What F saves for B: who holds it, from when to when, and how much at most.

One rule for caps, credits, memory and statistics: the activations of a stage and a
microbatch are held by the worker of their B, from the start of F to the end of the job
that releases them: B, or W where the backward is split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..jobs.job import Direction, Job
from ..jobs.schedule import Schedule
from .jobs import Jobs, Numbers
from .timeline import Timeline

FORWARD, BACKWARD, WEIGHT, _ = Direction


class Lifetime(NamedTuple):
    """The kinds of jobs that save, read and release a stage's activations."""

    forward: int
    backward: int
    release: int


class Parked(NamedTuple):
    """Activations that wait elsewhere, between two times: those of a job F, by number.

    worker: who holds them then; None for the host or a file.
    """

    job: int
    worker: int | None
    start: float
    end: float


class Allocations(NamedTuple):
    """What jobs do to the room for activations of the worker that holds them."""

    at_start: list[float]  # by kind: what a job's start takes
    at_end: list[float]  # by kind: what its end gives back


def lifetimes(jobs: Jobs, release: Direction) -> list[Lifetime]:
    """Of each stage that has a B, which releases too where the stage has no W."""
    at = jobs.at
    return [
        Lifetime(at[s, FORWARD], at[s, BACKWARD], at.get((s, release), at[s, BACKWARD]))
        for s, d in jobs.kinds
        if d is FORWARD and (s, BACKWARD) in at
    ]


def holders(jobs: Jobs, release: Direction) -> Numbers:
    """Of each job that saves or releases activations, the job B whose worker holds
    them; of others, themselves."""
    found = np.arange(len(jobs))
    for life in lifetimes(jobs, release):
        for kind in (life.forward, life.release):
            found[jobs.grid[:, kind]] = jobs.grid[:, life.backward]
    return found


def most_in_flight(schedule: Schedule, stage: int) -> int:
    """Microbatches of a stage that one worker holds at most, whenever its jobs run."""
    if schedule.is_open:
        return schedule.microbatches
    cap, most = schedule.cap(stage), max(holding(schedule, stage).values())
    return most if cap is None else min(most, cap)


def holding(schedule: Schedule, stage: int) -> Counter[int]:
    """How many microbatches' B of a stage each worker runs."""
    every = range(schedule.microbatches)
    return Counter(schedule.place(Job(stage, b, BACKWARD)).compute for b in every)


def credits(schedule: Schedule, timeline: Timeline) -> dict[int, int]:
    """The job that makes room for each capped F, by number, first out first in.

    That is flow control by credits: a worker with room for k microbatches of a stage
    starts its F number k + i once release number i has ended.
    """
    jobs, order = timeline.jobs, np.asarray(timeline.order, np.int64)
    limits, releases = np.full(len(jobs.kinds), -1), np.zeros(len(jobs.kinds), bool)
    for life in lifetimes(jobs, schedule.release):
        limit = schedule.cap(jobs.kinds[life.forward][0])
        if limit is not None:
            limits[life.forward], releases[life.release] = limit, True
    (kind, _, worker), holder = jobs.columns, holders(jobs, schedule.release)
    place = kind[holder] * jobs.workers + worker[holder]

    def by_place(numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Jobs, and which of its place each is: the place times all jobs, plus that."""
        numbers = numbers[np.argsort(place[numbers], kind="stable")]
        own = place[numbers]
        count = np.arange(len(own)) - np.searchsorted(own, own)
        return numbers, own * len(jobs) + count

    started, which = by_place(order[limits[kind[order]] >= 0])
    released, gives = by_place(order[releases[kind[order]]])
    limit_of = limits[kind[started]]
    late = which % len(jobs) >= limit_of
    room = released[np.searchsorted(gives, (which - limit_of)[late])]
    return dict(zip(started[late].tolist(), room.tolist(), strict=True))


def allocations(
    jobs: Jobs, release: Direction, sizes: Sequence[float], kept: float = 1.0
) -> Allocations:
    """What starts and ends of jobs take and give back.

    sizes: what one microbatch counts, by kind. kept: the share of it that stays from B
    to `release`, if that is W.
    """
    taken, given_back = [0.0] * len(jobs.kinds), [0.0] * len(jobs.kinds)
    for forward, backward, last in lifetimes(jobs, release):
        taken[forward] = sizes[forward]
        given_back[backward] = sizes[forward] * (1.0 - kept)
        given_back[last] += sizes[forward] * kept
    return Allocations(taken, given_back)


def peaks(
    timeline: Timeline,
    release: Direction,
    sizes: Sequence[float],
    kept: float = 1.0,
    parked: Sequence[Parked] = (),
) -> list[float]:
    """The most that each worker holds at one time; see allocations. Of what happens at
    one time, what is given back goes before what is taken."""
    jobs, order = timeline.jobs, np.asarray(timeline.order, int)
    start, end = np.asarray(timeline.start), np.asarray(timeline.end)
    change = np.subtract(*allocations(jobs, release, sizes, kept))
    change = change[jobs.columns.kind[order]]
    counted = change != 0
    order, change = order[counted], change[counted]
    start, end = start[counted], end[counted]
    own = jobs.columns.worker[holders(jobs, release)]
    holder, taken = own[order], change > 0
    time = np.where(taken, start, end)
    moves: list[tuple[int, float, float]] = []
    for job, worker, away, back in parked:
        size = sizes[jobs.kind[job]]
        moves += (own[job], away, -size), (own[job], back, size)
        if worker is not None:
            moves += (worker, away, size), (worker, back, -size)
    if moves:
        who, when, what = zip(*moves, strict=True)
        holder, change = np.append(holder, who), np.append(change, what)
        time, taken = np.append(time, when), change > 0
    by_time = np.lexsort((taken, time, holder))
    holder, held = holder[by_time], np.cumsum(change[by_time])
    first = np.flatnonzero(np.diff(holder, prepend=-1))
    before = np.concatenate(([0.0], held))[first]  # of the workers before, if any stay
    most = np.zeros(jobs.workers)
    if len(first):
        most[holder[first]] = np.maximum.reduceat(held, first) - before
    return [float(m) for m in most]
