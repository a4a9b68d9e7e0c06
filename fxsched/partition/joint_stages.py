"""Cuts a model in which rows of the whole batch meet.

What runs on all rows is in stages of its own, one for each time that rows meet on the
way through the model. What microbatches do before and after such a stage is cut apart,
as F of all microbatches lies between; so is the count of stages, by their work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ..jobs.job import Job, PlanError
from ..jobs.own_caps import CapsOfKnown, OwnCaps
from ..jobs.per_shard import as_per_shard
from ..jobs.schedule import InFlight, Schedule
from .cut_cost import Cut, Problem
from .partitioner import part_of
from .planner import choose_cut


def phases_of(reads: Sequence[Sequence[int]], joint: Sequence[bool]) -> list[int]:
    """For each unit how often rows have met before it, itself not counted.

    reads: the units that each one reads, all before it.
    """
    phases: list[int] = []
    for unit, sources in enumerate(reads):
        before = [
            phases[source] + (joint[source] and not joint[unit]) for source in sources
        ]
        phases.append(max(before, default=0))
    return phases


def cut_phases(
    problem: Problem, phases: Sequence[int], schedule: Schedule, limit: float | None
) -> Cut:
    """The stages of units that run in microbatches; there may be none.

    schedule: with a number of stages, if there are several phases.
    """
    if not phases:
        return ()
    if schedule.stages is not None and schedule.stages > len(phases):
        schedule = replace(schedule, stages=len(phases))
    every = sorted(set(phases))
    parts = [[u for u, p in enumerate(phases) if p == phase] for phase in every]
    if len(parts) == 1:
        return choose_cut(problem, schedule, limit).cut
    stages = [0] * len(phases)
    first = 0
    counts = _shares(problem, parts, schedule.stages or len(parts))
    for part, count in zip(parts, counts, strict=True):
        cut = choose_cut(
            part_of(problem, part), replace(schedule, stages=count, fit=None), limit
        ).cut
        for unit, stage in zip(part, cut, strict=True):
            stages[unit] = first + stage
        first += max(cut) + 1
    return tuple(stages)


def cut_apart(cut: Cut, phases: Sequence[int]) -> tuple[Cut, list[int]]:
    """A cut at what the user names, whose stages are cut once more where rows meet; and
    the stage of the user's that each stage is of."""
    pairs = sorted(set(zip(phases, cut, strict=True)))
    named = sorted(set(cut))
    stages = tuple(map(pairs.index, zip(phases, cut, strict=True)))
    return stages, [named.index(stage) for _, stage in pairs]


def shared_out(work: Sequence[float], count: int) -> list[int]:
    """For more stages than a schedule has: which of its stages each one is of, in
    order, by their work."""
    if len(work) <= count:
        return list(range(len(work)))
    ends = list(accumulate(work))
    total = ends[-1] or 1.0
    middles = ((end - own / 2) / total for end, own in zip(ends, work, strict=True))
    return [min(int(middle * count), count - 1) for middle in middles]


def _shares(problem: Problem, parts: Sequence[Sequence[int]], wanted: int) -> list[int]:
    """How many of the wanted stages each part gets, by its work; one at least."""
    work = [sum(problem.units[u].seconds for u in part) for part in parts]
    counts = [1] * len(parts)
    for _ in range(wanted - len(parts)):
        room = [i for i, part in enumerate(parts) if counts[i] < len(part)]
        counts[max(room, key=lambda i: work[i] / counts[i])] += 1
    return counts


def with_joint(
    schedule: Schedule, beside: Mapping[int, int], of: Sequence[int]
) -> Schedule:
    """The schedule of a model with global-batch stages, which come after all others.

    beside: for each, the last stage that it reads: where w or n, made for a fixed
        number of stages, know nothing of a global-batch one, it is asked for that.
    of: for each other stage, the schedule's stage that w and n are asked for.
    """
    if not beside or schedule.is_open:
        return schedule
    known = dict(enumerate(of))
    for s in sorted(beside):  # which may be beside each other
        near = known.get(beside[s], beside[s])
        known[s] = s if _knows(schedule, s) else near

    return replace(
        schedule,
        w=_of_known(schedule.w, known),
        n=_of_known(schedule.n, known),
        stages=None if schedule.stages is None else len(known),
        in_flight=_caps(schedule, beside, known),
        u=_of_known(schedule.u, known),
        rate=_of_known(schedule.rate, known),
        drift=_of_known(schedule.drift, known),
        version=_of_known(schedule.version, known),
    )


def _knows(schedule: Schedule, stage: int) -> bool:
    """Whether w and n have answers for a stage."""
    try:
        for d in schedule.directions:
            schedule.place(Job(stage, 0, d))
            schedule.priority(Job(stage, 0, d))
            schedule.priority(Job(stage, schedule.microbatches - 1, d))
    except PlanError:
        return False
    return True


def _caps(
    schedule: Schedule, joint: Iterable[int], known: Mapping[int, int]
) -> InFlight:
    """in_flight, which is about microbatches, and not about global-batch stages."""
    caps = schedule.in_flight
    if not callable(caps):
        return caps
    others = frozenset(joint)
    if isinstance(caps, OwnCaps):
        return OwnCaps(_Capped(caps.cap, known, others), caps.lifted)
    return _Capped(caps, known, others)


def _of_known(answer: Any, known: Mapping[int, int]) -> Any:
    return None if answer is None else as_per_shard(_Known(answer, known), answer)


@dataclass(frozen=True, eq=False)
class _Known:
    """A function of the stage, asked for those that it knows."""

    answer: Callable[..., Any]
    known: Mapping[int, int]

    def __call__(self, s: int, *more: Any) -> Any:
        return self.answer(self.known.get(s, s), *more)


@dataclass(frozen=True, eq=False)
class _Capped(_Known, CapsOfKnown):
    """A cap for all but these stages."""

    joint: frozenset[int]

    def __call__(self, s: int, *more: Any) -> Any:
        return None if s in self.joint else super().__call__(s, *more)
