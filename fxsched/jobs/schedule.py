"""A schedule: where every job runs (w), and which goes first (n)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import networkx as nx

from . import answers
from .answers import (
    Cap,
    Drift,
    Drifts,
    Place,
    Priority,
    Rate,
    Rates,
    Updater,
    Version,
)
from .fields import checked_fields
from .job import Direction, Job, Placement, PlanError
from .per_shard import CALLED as SHARDED
from .per_shard import for_shard, per_shard
from .user_values import is_int, raised

SAVED = 1  # version of the files that Schedule.save writes
PROBED = 8  # stages of a schedule that leaves their number to the planner

InFlight = int | Cap | None


@dataclass(frozen=True)
class Schedule:
    """A parallelism scheme: where every job runs (w) and which goes first (n).

    workers: how many workers there are, numbered from 0.
    microbatches: how many equal parts a batch is cut into along dimension 0.
    stages: how many stages the model is cut into; None leaves it to the planner: the
        multiple of the workers with the shortest predicted step; the least from eight
        on, where w is the same for all stages.
    shards: how many shards each stage is cut into, by backend(shards=), numbered from
        0; with more than 1, w and n may take a fourth argument, and u and version a
        last one: the shard p.
    w(s, b, d): Placement, or a pair (weight worker, compute worker). A global-batch
        stage, in which rows of all microbatches meet, has one job a direction, asked
        with b = 0.
    n(s, b, d): an int; of the jobs that are ready a worker takes the smallest. F of a
        global-batch stage is asked with the last b, its B and W with 0.
    in_flight: how many microbatches of a stage may be between F and B (W, if the
        backward is split) on one worker (the one that holds the activations, where B
        runs): None for no limit, an int, or a function of the stage. Those of the
        library are lifted where B waits for F of all microbatches.
    split_backward: B makes the gradients of a stage's inputs only, and a job W of its
        own, asked of w and n like the others, those of its weights.
    in_order: workers take their jobs strictly by n, and wait for the next where it
        isn't ready, instead of running another that is.
    update_every: the program has a step of the optimizer after every so many
        microbatches, which divide them: a job U of each stage, numbered by the last of
        its microbatches. None: the program has one, at the end, if the backend has the
        optimizer; else the loop steps. n is asked for U too.
    u(s, b): the worker that keeps a stage's optimizer state, gets its gradient and
        updates it, of the microbatch b that U has; the same for all b of a stage. All
        that keep its weights get the new ones. None: each of those updates its own.
    version(s, b, d): how many of a call's updates of stage s the weights of a job have
        seen; at most b // update_every, all those before its own. None: these.
    rate(s): a pair (delay, annealed): the optimizer's learning rates at update k of a
        stage, counted over all calls, are divided by
        delay ** (1 - min(k / annealed, 1)). None: they are as they are.
    drift(s): a pair (gap, decay): B and W of a stage read weights less gap times their
        velocity, which an update, of all calls, makes
        decay * velocity + (1 - decay) * (weights after it - weights before it).
        None: they read what version says.
    ahead: where updates are in order of arrival, as backend(order="dynamic") makes
        them: how many more of a stage's a worker may have given than the slowest;
        math.inf for no bound. Then a job waits for no updates but for the one that
        version names, number version(s, b, d), and takes what others there are. It
        takes update_every=1. 0: updates are in the planned order.
    average_every: workers that keep a stage's weights are replicas, each of which takes
        its steps with the gradients of its own microbatches alone, and after so many of
        them all are averaged, and so is the optimizer's state; a call ends with that.
    elastic: how far replicas and their centre go towards each other where they would be
        averaged: x -= elastic (x - centre), centre += elastic sum(x - centre). All are
        the centre at the end of a call, and the optimizer's state is averaged there.
    fit: gives the schedule for the stages that a model was cut into, for those whose w,
        n, in_flight or u depend on them; see schedules.graph. Stages are a
        networkx.DiGraph, as fxsched/clock/stage_record.py describes it. Where w is
        given too, jobs run where that says.
    """

    workers: int
    microbatches: int
    stages: int | None = None
    w: Place = lambda s, b, d: Placement(0, 0)
    n: Priority = lambda s, b, d: b
    in_flight: InFlight = None
    name: str | None = None
    fit: Callable[[nx.DiGraph[int]], Schedule] | None = None
    split_backward: bool = False
    in_order: bool = False
    update_every: int | None = None
    u: Updater | None = None
    version: Version | None = None
    rate: Rates | None = None
    drift: Drifts | None = None
    ahead: float = 0
    average_every: int | None = None
    elastic: float | None = None
    shards: int = 1

    def __post_init__(self) -> None:
        for field, number in checked_fields(vars(self)).items():
            object.__setattr__(self, field, number)
        for field in SHARDED if self.shards > 1 else ():
            function = vars(self)[field]
            object.__setattr__(self, field, function and per_shard(field, function))

    def __call__(self, *arguments: Any) -> Callable[..., NoReturn]:
        """What torch.compile(model, backend=schedule) gets: the error that says what to
        write, in the first call of the model."""

        def refuse(*inputs: object) -> NoReturn:
            raise PlanError(
                "torch.compile(backend=) was given a Schedule, which says what runs "
                "where; give torch.compile(model, backend=fxsched.backend(schedule))"
            )

        return refuse

    def __str__(self) -> str:
        name = self.name or "schedule"
        return f"{name}: {self.workers} workers, {self.microbatches} microbatches"

    @property
    def directions(self) -> tuple[Direction, ...]:
        """F and B, and W if the backward is split."""
        return tuple(Direction)[: 3 if self.split_backward else 2]

    @property
    def release(self) -> Direction:
        """The job that lets go of a stage's activations: B, or W if it is split off."""
        return self.directions[-1]

    @property
    def is_open(self) -> bool:
        """Whether where jobs run waits for the stages: fit is given, and w is not."""
        return self.fit is not None and self.w is Schedule.w

    def fitted(self, stages: nx.DiGraph[int]) -> Schedule:
        """What fit gives for these stages, checked; without fit, this schedule."""
        if self.fit is None:
            return self
        try:
            fitted = self.fit(stages)
        except Exception as error:
            raise raised("fit(stages)", error, "a networkx.DiGraph") from error
        wanted = (self.workers, self.microbatches)
        if not isinstance(fitted, Schedule) or wanted != (
            fitted.workers,
            fitted.microbatches,
        ):
            raise PlanError(
                f"fit returned {fitted}; return a Schedule with the same workers "
                f"({self.workers}) and microbatches ({self.microbatches})"
            )
        return replace(
            fitted,
            fit=None,
            update_every=fitted.update_every or self.update_every,
            u=fitted.u or self.u,
            version=fitted.version or self.version,
            rate=fitted.rate or self.rate,
            drift=fitted.drift or self.drift,
            ahead=fitted.ahead or self.ahead,
            average_every=fitted.average_every or self.average_every,
            elastic=fitted.elastic or self.elastic,
        )

    def first(self, microbatches: int) -> Schedule:
        """What is left of it without the jobs of all but the first microbatches.

        Caps and orders hold for these as they did for all. Raises PlanError for more
        than it has.
        """
        if microbatches == self.microbatches:
            return self
        if not is_int(microbatches) or not 0 < microbatches < self.microbatches:
            raise PlanError(
                f"first(microbatches={microbatches!r}): give an int from 1 to "
                f"{self.microbatches}"
            )

        if self.update_every is not None and microbatches % self.update_every:
            raise PlanError(
                f"{microbatches} microbatches don't divide into updates of "
                f"{self.update_every} each; give a batch that does, or another "
                "update_every"
            )

        def fit(stages: nx.DiGraph[int]) -> Schedule:
            return replace(self.fitted(stages), microbatches=microbatches)

        return replace(
            self, microbatches=microbatches, fit=None if self.fit is None else fit
        )

    def local_microbatches(self, rank: int) -> tuple[int, ...]:
        """Microbatches of which a worker runs a job, of any stage and direction: all of
        them, where that depends on the stages of a model (`fit` without w).

        Where `stages` is None, w is asked for the first PROBED.
        """
        if not is_int(rank) or not 0 <= rank < self.workers:
            raise PlanError(f"rank {rank!r}: give a worker, 0..{self.workers - 1}")
        every = range(self.microbatches)
        if self.is_open:
            return tuple(every)
        stages = range(self.stages or max(PROBED, 2 * self.workers))
        return tuple(
            b
            for b in every
            if any(
                self.place(Job(s, b, d)).compute == rank
                for s in stages
                for d in self.directions
            )
        )

    def local_rows(self, rank: int, batch: int) -> list[int]:
        """The rows of a batch that a worker reads, in their order: those of the
        microbatches that it runs a job of. With ddp each worker has its own; with a
        pipeline each reads them all.

        batch: samples of the whole batch. Raises PlanError if it doesn't divide into
        the microbatches.
        """
        if not is_int(batch) or batch < 1 or batch % self.microbatches:
            raise PlanError(
                f"local_rows(batch={batch!r}): give a multiple of the "
                f"{self.microbatches} microbatches"
            )
        size = batch // self.microbatches
        parts = self.local_microbatches(rank)
        return [row for b in parts for row in range(b * size, (b + 1) * size)]

    def save(self, path: str | PathLike[str]) -> None:
        """Writes what w and n say of each job, and in_flight of each stage, into a JSON
        file; fxsched.load_schedule reads it.

        Raises PlanError where the stages are open, for shards, and for a wrong w, n or
        path.
        """
        if self.stages is None or self.fit is not None:
            raise PlanError(
                f"save: {self} leaves its stages to the planner; save plan.schedule, "
                "or dataclasses.replace(schedule, stages=4)"
            )
        stages, every = range(self.stages), range(self.microbatches)
        jobs = [Job(s, b, d) for s in stages for b in every for d in self.directions]
        if self.shards > 1:
            raise PlanError(
                f"save: {self} has {self.shards} shards, which a file can't hold; save "
                "the schedule without shards, and call schedules.sharded on the loaded "
                "one"
            )
        record = {
            "fxsched_schedule": SAVED,
            "name": self.name or "schedule",
            "workers": self.workers,
            "microbatches": self.microbatches,
            "stages": self.stages,
            "split_backward": self.split_backward,
            "in_order": self.in_order,
            "in_flight": [self.cap(stage) for stage in stages],
            "jobs": {str(job): [*self.place(job), self.priority(job)] for job in jobs},
        }
        if self.update_every is not None or self.u is not None:
            ends = self.updated(self.update_every or self.microbatches)
            updates = [Job(s, b, Direction.UPDATE) for s in stages for b in ends]
            record["update_every"] = self.update_every
            record["updates"] = {str(job): self.priority(job) for job in updates}
            record["updaters"] = [self.updater(stage) for stage in stages]
        if self.average_every is not None:
            record["average_every"] = self.average_every
            record["elastic"] = self.elastic
        if self.version is not None:
            record["versions"] = {str(job): self.seen(job) for job in jobs}
        if self.rate is not None:
            record["rates"] = [self.stage_rate(stage) for stage in stages]
        if self.drift is not None:
            record["drifts"] = [self.stage_drift(stage) for stage in stages]
        if self.ahead:
            record["ahead"] = None if self.ahead == inf else int(self.ahead)
        try:
            Path(path).write_text(json.dumps(record) + "\n", "utf-8")
        except OSError as error:
            raise PlanError(
                f"{path} can't be written: {error.strerror}; give another path"
            ) from error

    def place(self, job: Job, shard: int = 0) -> Placement:
        """w of a job, checked. Raises PlanError if it isn't two workers in range."""
        return answers.placement(for_shard(self.w, shard), job, self.workers)

    def priority(self, job: Job, shard: int = 0) -> int:
        """n of a job, checked. Raises PlanError if it isn't an int."""
        return answers.priority(for_shard(self.n, shard), job)

    def seen(self, job: Job) -> int:
        """How many updates of its stage a job's weights have seen, checked.

        Raises PlanError if it isn't an int from 0 to the updates before its own.
        """
        every = self.update_every
        if not every:
            return 0
        if self.version is None:
            return job.microbatch // every
        return answers.version(self.version, job, every)

    def averages(self, updates: int) -> bool:
        """Whether replicas are averaged after so many updates of a call."""
        return self.average_every is not None and updates % self.average_every == 0

    def updated(self, every: int) -> range:
        """The microbatches that updates are numbered by, one for each `every`."""
        return range(every - 1, self.microbatches, every)

    def updater(self, stage: int) -> int | None:
        """The worker that u names for a stage; None without u.

        Raises PlanError if it isn't one worker, the same for all updates.
        """
        if self.u is None:
            return None
        ends = self.updated(self.update_every or self.microbatches)
        return answers.updater(self.u, stage, ends, self.workers)

    def stage_rate(self, stage: int) -> Rate | None:
        """How a stage's learning rates begin, checked."""
        return None if self.rate is None else answers.rate(self.rate, stage)

    def stage_drift(self, stage: int) -> Drift | None:
        """How far B and W read from a stage's weights, checked."""
        return None if self.drift is None else answers.drift(self.drift, stage)

    def gap(self, job: Job) -> float:
        """How many velocities a job reads away from the weights of its version."""
        if self.drift is None or job.direction is Direction.FORWARD:
            return 0.0
        drift = self.stage_drift(job.stage)
        return 0.0 if drift is None else drift.gap

    def cap(self, stage: int) -> int | None:
        """How many microbatches of `stage` may be in flight on one worker."""
        if not callable(self.in_flight):
            return self.in_flight
        return answers.cap(self.in_flight, stage)
