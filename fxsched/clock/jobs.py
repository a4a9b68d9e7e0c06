"""The jobs of a step as rows of arrays, which makes millions of them cheap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..jobs.job import ALL_ROWS, Direction, Job

Kind = tuple[int, Direction]
Numbers: TypeAlias = NDArray[np.int64]


class Columns(NamedTuple):
    """Columns of jobs as arrays; see Jobs."""

    kind: Numbers
    keeper: Numbers
    worker: Numbers


@dataclass(frozen=True)
class Jobs:
    """The jobs of a step; a job's number is its row.

    The jobs of a microbatch come before those of the next. A global-batch stage has one
    job a direction, in microbatch 0's place. Steps of the optimizer come last, one for
    each worker that takes the step.

    kinds: stage and direction; those of updates come after all others.
    preds: of each kind that is no update, the kinds whose results it reads: of the same
        microbatch; a joint kind reads all microbatches, and is read by all.
    joint: the kinds that have one job, on all rows of the batch.
    kind, rows: of each job, its place in `kinds`, and its microbatch or ALL_ROWS; of an
        update, the last microbatch that it is for.
    keeper, worker, n: who keeps its weights, who runs it, and its priority.
    waits: further jobs that wait for a job, and get nothing from it.
    saved: of F, where what they save waits, if w says so: see Placement.
    versions: how many of a call's updates the weights of each job have seen; () for
        none. gaps: of each kind, how many velocities its jobs read away from their
        version of weights; () for none.
    """

    kinds: tuple[Kind, ...]
    preds: tuple[tuple[int, ...], ...]
    joint: frozenset[int]
    microbatches: int
    workers: int
    kind: Sequence[int]
    rows: Sequence[int]
    keeper: Sequence[int]
    worker: Sequence[int]
    n: Sequence[int]
    waits: Mapping[int, Sequence[int]] = field(default_factory=dict)
    versions: Sequence[int] = ()
    saved: Mapping[int, int | str] = field(default_factory=dict)
    gaps: Sequence[float] = ()

    def __len__(self) -> int:
        """How many jobs there are."""
        return len(self.kind)

    def job(self, number: int) -> Job:
        """The job of a number."""
        stage, direction = self.kinds[self.kind[number]]
        return Job(stage, self.rows[number], direction)

    def version(self, number: int) -> int:
        """How many of a call's updates the weights of a job have seen."""
        return self.versions[number] if self.versions else 0

    def gap(self, number: int) -> float:
        """How many velocities a job reads away from its version of weights."""
        return self.gaps[self.kind[number]] if self.gaps else 0.0

    @cached_property
    def columns(self) -> Columns:
        """The columns that are counted with, as arrays."""
        columns = (self.kind, self.keeper, self.worker)
        return Columns(*(np.array(column, np.int64) for column in columns))

    @property
    def regular(self) -> int:
        """How many jobs are no updates."""
        width, alone = len(self.preds), len(self.joint)
        return self.microbatches * (width - alone) + alone

    @property
    def updates(self) -> range:
        """The numbers of updates."""
        return range(self.regular, len(self))

    @cached_property
    def at(self) -> dict[Kind, int]:
        """The place of each kind."""
        return {kind: i for i, kind in enumerate(self.kinds)}

    def find(self, kind: int, microbatch: int) -> int:
        """The number of the job of a kind that has a microbatch's rows."""
        return int(self.grid[microbatch, kind])

    @cached_property
    def grid(self) -> Numbers:
        """What `find` says of all microbatches (rows) and kinds (columns)."""
        width, alone = len(self.preds), sorted(self.joint)
        several = np.ones(width, np.int64)
        several[alone] = 0
        each = several.sum()
        starts = width - each + each * np.arange(self.microbatches)[:, None]
        grid: Numbers = starts + np.cumsum(several) - several
        grid[:1] = np.arange(width)
        grid[:, alone] = alone
        return grid

    def of(self, kind: int) -> list[int]:
        """The numbers of a kind's jobs, in the order of microbatches."""
        column: Numbers = (
            self.grid[:1, kind] if kind in self.joint else self.grid[:, kind]
        )
        numbers: list[int] = column.tolist()
        return numbers

    @cached_property
    def _edges(self) -> tuple[Numbers, Numbers]:
        """Makers and readers of results, sorted; of a job's readers global-batch ones
        last."""
        pairs = [(p, k) for k, before in enumerate(self.preds) for p in before]
        makers, readers = np.array(pairs, np.int64).reshape(-1, 2).T
        maker, reader = self.grid[:, makers], self.grid[:, readers]
        key = maker * len(self) + reader
        if self.joint:
            alone = sorted(self.joint)
            one, other = np.isin(makers, alone), np.isin(readers, alone)
            key = key + maker * len(self) + other * len(self)
            once = (one & other) & (np.arange(self.microbatches) > 0)[:, None]
            maker, reader, key = maker[~once], reader[~once], key[~once]
        by_maker = np.argsort(key, axis=None)
        return maker.ravel()[by_maker], reader.ravel()[by_maker]

    @cached_property
    def readers(self) -> tuple[list[int], list[int]]:
        """For job j, numbers[starts[j] : starts[j + 1]] read what it makes: the pair
        (starts, numbers)."""
        maker, reader = self._edges
        counts = np.bincount(maker, minlength=len(self))
        starts = np.concatenate(([0], np.cumsum(counts)))
        return starts.tolist(), reader.tolist()

    @cached_property
    def awaited(self) -> list[int]:
        """How many jobs each reads of or waits for."""
        counts: list[int] = np.bincount(self._edges[1], minlength=len(self)).tolist()
        for after in self.waits.values():
            for number in after:
                counts[number] += 1
        return counts

    @cached_property
    def _updates(self) -> dict[tuple[int, int, int], int]:
        """Numbers of updates, by stage, microbatch and worker."""
        return {
            (self.kinds[self.kind[i]][0], self.rows[i], self.worker[i]): i
            for i in self.updates
        }

    def number(self, job: Job, worker: int | None = None) -> int:
        """The number of a job; of an update, which several workers may run, that of one
        of them."""
        if job.direction is Direction.UPDATE:
            assert worker is not None, f"{job} may run on several workers"
            return self._updates[job.stage, job.microbatch, worker]
        return self.find(self.at[job.stage, job.direction], job.microbatch)


def job_rows(
    kinds: Sequence[Kind], joint: frozenset[int], microbatches: int
) -> tuple[list[int], list[int]]:
    """`kind` and `rows` of jobs without updates."""
    every = range(len(kinds))
    kind, rows = list(every), [ALL_ROWS if k in joint else 0 for k in every]
    own = [k for k in every if k not in joint]
    for b in range(1, microbatches):
        kind += own
        rows += [b] * len(own)
    return kind, rows


NO_JOBS = Jobs((), (), frozenset(), 0, 0, (), (), (), (), ())


def weight_owners(jobs: Jobs) -> dict[int, list[int]]:
    """The workers that keep the weights of each stage."""
    kind, keeper, _ = jobs.columns
    regular = kind < len(jobs.preds)
    pairs = np.unique(kind[regular] * jobs.workers + keeper[regular])
    keepers: dict[int, set[int]] = {}
    for kind_of, worker in zip(*divmod(pairs, jobs.workers), strict=True):
        keepers.setdefault(jobs.kinds[kind_of][0], set()).add(int(worker))
    return {stage: sorted(keepers[stage]) for stage in sorted(keepers)}


def weights_stay(jobs: Jobs) -> bool:
    """Whether each stage runs on one worker, which keeps its weights."""
    _, keeper, worker = jobs.columns
    alone = all(len(owners) == 1 for owners in weight_owners(jobs).values())
    return alone and bool((keeper == worker).all())


def source_of(owners: Sequence[int], keeper: int, here: int) -> int:
    """The worker that serves a group of weights to one job: the one that w names, if it
    keeps them, else the job's own, else the first owner. A tied parameter is kept by
    the owners of its first stage only, and what an earlier plan placed stays there.

    keeper: where w puts the job's weights. here: where it runs.
    """
    return next((w for w in (keeper, here) if w in owners), owners[0])


def sum_root(owners: Sequence[int], number: int) -> int:
    """The owner that adds up gradients: of its stages or groups, each in turn."""
    return owners[number % len(owners)]
