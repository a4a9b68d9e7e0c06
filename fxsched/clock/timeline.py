"""The jobs of a step by number, and the timeline of those that ran.

Jobs are numbers: those of microbatch b are b * K to b * K + K - 1, where K is how many
kinds of jobs, (stage, direction), a microbatch has. That makes millions cheap. Kinds of
joint stages have one job, that of microbatch 0; the numbers of the others stay unused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, overload

from ..jobs.job import ALL_ROWS, Direction, Job

Kind = tuple[int, Direction]


class Event(NamedTuple):
    """A job that ran: on which worker, from when to when."""

    job: Job
    worker: int
    start: float
    end: float


@dataclass(frozen=True)
class Jobs:
    """The jobs of a step, by number.

    kinds: stage and direction of the jobs of one microbatch, in an order that breaks
        ties of n; a microbatch's jobs come before those of the next.
    preds: for each kind, the kinds that it waits for, of the same microbatch; of joint
        kinds the one job that there is, and they wait for those of all microbatches.
    weights, compute, n: the workers and the priority of each job. Unused numbers have
        those of the job that there is.
    more: further successors of jobs, which nothing is sent to.
    updates: stage and microbatch of the optimizer's steps, whose numbers come after
        those of all other jobs; one for each worker that takes the step, which
        `compute` has, as it has their n in `n`. What they wait for is in `more`.
    joint: the kinds that have one job, on all rows.
    versions: how many of a call's updates the weights of each job have seen; () for
        none. gaps: for each kind, how many velocities its jobs read away from their
        version of weights; () for none.
    """

    kinds: tuple[Kind, ...]
    preds: tuple[tuple[int, ...], ...]
    microbatches: int
    workers: int
    weights: Sequence[int]
    compute: Sequence[int]
    n: Sequence[int]
    more: Mapping[int, Sequence[int]] = field(default_factory=dict)
    updates: tuple[tuple[int, int], ...] = ()
    joint: frozenset[int] = frozenset()
    versions: Sequence[int] = ()
    gaps: Sequence[float] = ()

    def __len__(self) -> int:
        """How many numbers there are."""
        return len(self.compute)

    @property
    def count(self) -> int:
        """How many jobs there are."""
        return len(self.compute) - len(self.joint) * (self.microbatches - 1)

    def unused(self, number: int) -> bool:
        """Whether a number has no job."""
        width = len(self.kinds)
        return width <= number < self.regular and number % width in self.joint

    def job(self, number: int) -> Job:
        """The job of a number."""
        if number >= self.regular:
            stage, microbatch = self.updates[number - self.regular]
            return Job(stage, microbatch, Direction.UPDATE)
        microbatch, kind = divmod(number, len(self.kinds))
        stage, direction = self.kinds[kind]
        if kind in self.joint:
            return Job(stage, ALL_ROWS, direction)
        return Job(stage, microbatch, direction)

    def version(self, number: int) -> int:
        """How many of a call's updates the weights of a job have seen."""
        return self.versions[number] if self.versions else 0

    def gap(self, number: int) -> float:
        """How many velocities a job reads away from its version of weights."""
        return self.gaps[number % len(self.kinds)] if self.gaps else 0.0

    @property
    def regular(self) -> int:
        """How many jobs are no updates; their numbers come first."""
        return self.microbatches * len(self.kinds)

    def before(self, number: int) -> list[int]:
        """The numbers that a job waits for by its kind's preds."""
        width = len(self.kinds)
        if number >= self.regular:
            return []
        first = number - number % width
        numbers: list[int] = []
        for p in self.preds[number % width]:
            if p in self.joint:
                numbers.append(p)
            elif number % width in self.joint:
                numbers += range(p, self.regular, width)
            else:
                numbers.append(first + p)
        return numbers

    def waited_for(self) -> list[int]:
        """How many jobs each waits for by preds, by number; unused ones wait for one
        that never comes."""
        missing = [len(before) for before in self.preds] * self.microbatches
        for kind in self.joint:
            missing[kind :: len(self.kinds)] = [1] * self.microbatches
            missing[kind] = len(self.before(kind))
        return missing

    @cached_property
    def met(self) -> dict[int, list[int]]:
        """Successors, by preds, of jobs that are joint or that joint ones wait for."""
        after: dict[int, list[int]] = {}
        width = len(self.kinds)
        for kind, before in enumerate(self.preds) if self.joint else ():
            alone = kind in self.joint
            if not alone and self.joint.isdisjoint(before):
                continue
            for number in (kind,) if alone else range(kind, self.regular, width):
                for p in self.before(number):
                    if alone or p in self.joint:
                        after.setdefault(p, []).append(number)
        return after

    @property
    def met_or_more(self) -> Mapping[int, Sequence[int]]:
        """The successors of both kinds."""
        if not self.met:
            return self.more
        both = {number: list(after) for number, after in self.met.items()}
        for number, after in self.more.items():
            both.setdefault(number, []).extend(after)
        return both

    @cached_property
    def at(self) -> dict[Kind, int]:
        """The number of each kind."""
        return {kind: i for i, kind in enumerate(self.kinds)}

    @cached_property
    def _updates(self) -> dict[tuple[int, int, int], int]:
        """Numbers of updates, by stage, microbatch and worker."""
        return {
            (*update, self.compute[number]): number
            for number, update in enumerate(self.updates, self.regular)
        }

    def number(self, job: Job, worker: int | None = None) -> int:
        """The number of a job: by microbatch, then by kind; of an update, which several
        workers may run, that of one of them."""
        if job.direction is Direction.UPDATE:
            assert worker is not None, f"{job} may run on several workers"
            return self._updates[job.stage, job.microbatch, worker]
        kind = self.at[job.stage, job.direction]
        return job.microbatch * len(self.kinds) + kind


def weight_owners(jobs: Jobs) -> dict[int, list[int]]:
    """The workers that keep the weights of each stage."""
    keepers: dict[int, list[int]] = {}
    width = len(jobs.kinds)
    for stage in sorted({s for s, _ in jobs.kinds}):
        kinds = [k for k, (s, _) in enumerate(jobs.kinds) if s == stage]
        keepers[stage] = sorted({w for k in kinds for w in jobs.weights[k::width]})
    return keepers


class Timeline(Sequence[Event]):
    """Jobs that ran, in the order in which they started; equal starts by worker.

    order: their numbers; start, end: when, in the unit of the durations.
    """

    def __init__(
        self,
        jobs: Jobs,
        order: Sequence[int],
        start: Sequence[float],
        end: Sequence[float],
    ) -> None:
        self.jobs, self.order, self.start, self.end = jobs, order, start, end

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = self.order[index]
        worker = self.jobs.compute[number]
        return Event(self.jobs.job(number), worker, self.start[index], self.end[index])

    def __iter__(self) -> Iterator[Event]:
        return (self[i] for i in range(len(self)))

    @property
    def complete(self) -> bool:
        """Whether all jobs ran; a cap may stop them."""
        return len(self.order) == self.jobs.count
