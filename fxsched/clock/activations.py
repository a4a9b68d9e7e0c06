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
from .timeline import Jobs, Timeline

FORWARD, BACKWARD, WEIGHT, _ = Direction


class Lifetime(NamedTuple):
    """The kinds of jobs that save, read and release a stage's activations."""

    forward: int
    backward: int
    release: int


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


def to_holder(jobs: Jobs, release: Direction) -> list[int]:
    """By kind of what saves or releases: how far it is to B, whose worker holds."""
    distance = [0] * len(jobs.kinds)
    for life in lifetimes(jobs, release):
        distance[life.forward] = life.backward - life.forward
        distance[life.release] = life.backward - life.release
    return distance


def most_in_flight(schedule: Schedule, stage: int) -> int:
    """Microbatches of a stage that one worker holds at most, whenever its jobs run."""
    if schedule.is_open:
        return schedule.microbatches
    holders = Counter(
        schedule.place(Job(stage, b, BACKWARD)).compute
        for b in range(schedule.microbatches)
    )
    cap, most = schedule.cap(stage), max(holders.values())
    return most if cap is None else min(most, cap)


def credits(schedule: Schedule, timeline: Timeline) -> dict[int, int]:
    """The job that makes room for each capped F, by number, first out first in.

    That is flow control by credits: a worker with room for k microbatches of a stage
    starts its F number k + i once release number i has ended.
    """
    jobs, width = timeline.jobs, len(timeline.jobs.kinds)
    lives = lifetimes(jobs, schedule.release)
    distance = to_holder(jobs, schedule.release)
    forwards = {life.forward for life in lives}
    releases = {life.release for life in lives}
    released: dict[tuple[int, int], list[int]] = {}
    started: Counter[tuple[int, int]] = Counter()
    credit = {}
    for number in timeline.order:
        if number >= jobs.regular:
            continue
        kind = number % width
        stage = jobs.kinds[kind][0]
        place = (stage, jobs.compute[number + distance[kind]])
        if kind in releases:
            released.setdefault(place, []).append(number)
        elif kind in forwards:
            limit = schedule.cap(stage)
            started[place] += 1
            if limit is not None and started[place] > limit:
                credit[number] = released[place][started[place] - limit - 1]
    return credit


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
    timeline: Timeline, release: Direction, sizes: Sequence[float], kept: float = 1.0
) -> list[float]:
    """The most that each worker holds at one time; see allocations. Of what happens at
    one time, what is given back goes before what is taken."""
    jobs, order = timeline.jobs, np.asarray(timeline.order, int)
    start, end = np.asarray(timeline.start), np.asarray(timeline.end)
    regular = order < jobs.regular
    order, start, end = order[regular], start[regular], end[regular]
    change = np.subtract(*allocations(jobs, release, sizes, kept))
    distance = np.asarray(to_holder(jobs, release), int)
    kind = order % len(jobs.kinds)
    counted = change[kind] != 0
    order, kind = order[counted], kind[counted]
    start, end = start[counted], end[counted]
    holder = np.asarray(jobs.compute, int)[order + distance[kind]]
    taken = change[kind] > 0
    by_time = np.lexsort((taken, np.where(taken, start, end), holder))
    holder, held = holder[by_time], np.cumsum(change[kind][by_time])
    first = np.flatnonzero(np.diff(holder, prepend=-1))
    before = np.concatenate(([0.0], held))[first]  # of the workers before, if any stay
    most = np.zeros(jobs.workers)
    if len(first):
        most[holder[first]] = np.maximum.reduceat(held, first) - before
    return [float(m) for m in most]
