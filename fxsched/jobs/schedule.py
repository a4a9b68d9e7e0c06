"""A schedule: on which worker each job runs (w), and which job goes first (n)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
from .user_values import counted, is_int, raised

SAVED = 1  # version of the files that Schedule.save writes
PROBED = 8  # stages of a schedule that leaves their number to the planner

InFlight = int | Cap | None


@dataclass(frozen=True)
class Schedule:
    """A parallelism scheme: where each job runs (w), and which job goes first (n).

    workers: how many workers there are, numbered from 0.
    microbatches: how many equal parts a batch is cut into along dimension 0.
    stages: how many stages the model is cut into. None leaves the number to the
        planner: the multiple of the workers with the shortest predicted step or, if w
        is the same for all stages, the smallest multiple that is 8 or more.
    shards: how many shards each stage is cut into, by backend(shards=), numbered from
        0. With more than 1, w and n may take the shard p as a fourth argument, and u
        and version as their last one.
    w: a function w(s, b, d) that returns the Placement of a job, or a pair (weight
        worker, compute worker). The `saved` of F's says where its activations wait for
        B. A global-batch stage, in which rows of all microbatches
        meet, has one job in each direction; for this job w is called with b = 0.
    n: a function n(s, b, d) that returns the priority of a job, an int: of the jobs
        that are ready, a worker runs the one with the smallest n. For a global-batch
        stage, n is called with the last b for F, and with b = 0 for B and W.
    in_flight: how many microbatches of a stage may be between F and B (between F and W,
        if the backward is split) on one worker, the one that runs B and holds the
        activations: an int, a function of the stage, or None for no limit. The limits
        of library schedules are lifted where B waits for F of all microbatches.
    split_backward: whether B computes only the gradients of a stage's inputs, and a
        separate job W those of its weights. w and n are called for W too.
    in_order: whether workers run their jobs strictly in the order of n. A worker then
        waits for its next job if that job isn't ready, instead of running another one.
    update_every: the number of microbatches between two steps of the optimizer in the
        program; it must divide `microbatches`. Each step is a job U of each stage, with
        the number of the last microbatch before it. None: if the backend has the
        optimizer, the program has one step, at its end; otherwise your loop calls
        step(). n is called for U too.
    u: a function u(s, b) that returns the worker that keeps a stage's optimizer state,
        gets its gradients and updates its weights; b is the microbatch of the job U.
        The worker must be the same for all b of a stage. All workers that keep the
        stage's weights get the new weights. None: each worker that keeps the weights
        updates its own copy.
    version: a function version(s, b, d) that returns how many of the call's updates of
        stage s the weights that a job reads have had; at most b // update_every, which
        counts all updates before the job's own. None: b // update_every.
    rate: a function rate(s) that returns a pair (delay, annealed): at update k of a
        stage, counted over all calls, the optimizer's learning rates are divided by
        delay ** (1 - min(k / annealed, 1)). None: learning rates are not changed.
    drift: a function drift(s) that returns a pair (gap, decay): B and W of a stage read
        the weights minus gap times their velocity. Each update, in any call, sets the
        velocity to decay * velocity + (1 - decay) * (weights after it - weights before
        it). None: B and W read the weights of their version.
    ahead: how many more updates of a stage a worker may have contributed to than the
        slowest worker, if updates run in order of arrival, as with
        backend(order="dynamic"); math.inf for no bound. A job then waits only for
        update number version(s, b, d), and reads the weights with any other updates
        that have arrived. Requires update_every=1. 0: updates run in the planned order.
    average_every: the number of updates after which replicas are averaged. The workers
        that keep a stage's weights are then replicas: each of them steps with the
        gradients of its own microbatches only. The optimizer's state is averaged too.
        Each call ends with an average.
    elastic: how far replicas and their centre move towards each other, instead of being
        averaged: x -= elastic (x - centre), centre += elastic sum(x - centre), where x
        are a replica's weights. At the end of a call all replicas get the weights of
        the centre, and the optimizer's state is averaged.
    outer: a pair (lr, momentum): instead of being replaced by their average, replicas
        get the weights after a step of SGD with Nesterov momentum. The step starts from
        the weights that all replicas had after the previous average; its gradient is
        these weights minus the new average. (1, 0) is a plain average. The momentum is
        in the optimizer's state.
    fit: a function that returns the schedule for the stages that a model was cut into,
        if w, n, in_flight or u depend on the stages; see schedules.graph. Its argument
        is a networkx.DiGraph, described in fxsched/clock/stage_record.py. If w is given
        too, jobs run where w places them.
    candidates: schedules of which the planner takes the one with the shortest predicted
        step, and then improves its cut and its placement; see schedules.auto. Without a
        memory limit, no worker holds more than a tenth above what one holds under the
        first of them.
    cut: the stage of each operation of one model, by the names of plan.nodes, as the
        planner found it for a schedule with candidates. None leaves the cut to the
        planner, or to backend(stages=).
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
    outer: tuple[float, float] | None = None
    shards: int = 1
    candidates: tuple[Schedule, ...] = ()
    cut: Mapping[str, int] | None = None

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
        workers = counted(self.workers, "worker")
        return f"{name}: {workers}, {counted(self.microbatches, 'microbatch')}"

    @property
    def directions(self) -> tuple[Direction, ...]:
        """F and B, and W if the backward is split."""
        return tuple(Direction)[: 3 if self.split_backward else 2]

    @property
    def release(self) -> Direction:
        """The direction after which a stage's activations are freed: B, or W."""
        return self.directions[-1]

    @property
    def is_open(self) -> bool:
        """Whether placements depend on the stages: fit is given, and w is not."""
        return self.fit is not None and self.w is Schedule.w

    def fitted(self, stages: nx.DiGraph[int]) -> Schedule:
        """The schedule that fit returns for these stages; without fit, itself."""
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
            outer=fitted.outer or self.outer,
        )

    def first(self, microbatches: int) -> Schedule:
        """The same schedule for the first microbatches only.

        Limits and orders of these microbatches stay the same. Raises PlanError for more
        microbatches than the schedule has.
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
            self,
            microbatches=microbatches,
            fit=None if self.fit is None else fit,
            candidates=tuple(c.first(microbatches) for c in self.candidates),
        )

    def local_microbatches(self, rank: int) -> tuple[int, ...]:
        """The microbatches of which a worker runs a job, of any stage and direction.

        All microbatches, if placements depend on the stages of a model (`fit` without
        w). If `stages` is None, w is called for the first 8 stages.
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
        """The rows of a batch that a worker reads, in order.

        A worker reads the rows of the microbatches of which it runs a job. With ddp
        each worker reads rows of its own; in a pipeline each worker reads all rows.

        batch: the number of samples of the whole batch.
        Raises PlanError if `batch` isn't a multiple of the microbatches.
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
        """Writes w and n of each job, and in_flight of each stage, into a JSON file.

        fxsched.load_schedule reads the file. Raises PlanError if the number of stages
        is open, if the schedule has shards, and for a wrong w, n or path.
        """
        if self.stages is None or self.fit is not None:
            raise PlanError(
                f"save: {self} leaves its stages to the planner; save that of a plan, "
                "dataclasses.replace(plan.schedule, stages=..), with as many as "
                "print(plan) shows without *"
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
            "jobs": {
                str(job): [*self.place(job)[:2], self.priority(job)] for job in jobs
            },
        }
        places = ((str(job), self.place(job).saved) for job in jobs)
        if saved := {job: where for job, where in places if where is not None}:
            record["saved"] = saved
        if self.update_every is not None or self.u is not None:
            ends = self.updated(self.update_every or self.microbatches)
            updates = [Job(s, b, Direction.UPDATE) for s in stages for b in ends]
            record["update_every"] = self.update_every
            record["updates"] = {str(job): self.priority(job) for job in updates}
            record["updaters"] = [self.updater(stage) for stage in stages]
        if self.average_every is not None:
            record["average_every"] = self.average_every
            record["elastic"] = self.elastic
            if self.outer is not None:
                record["outer"] = self.outer
        if self.version is not None:
            record["versions"] = {str(job): self.seen(job) for job in jobs}
        if self.rate is not None:
            record["rates"] = [self.stage_rate(stage) for stage in stages]
        if self.cut is not None:
            record["cut"] = dict(self.cut)
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
        """The Placement that w returns for a job.

        Raises PlanError if w doesn't return two workers in range.
        """
        return answers.placement(for_shard(self.w, shard), job, self.workers)

    def priority(self, job: Job, shard: int = 0) -> int:
        """The priority that n returns for a job. Raises PlanError for no int."""
        return answers.priority(for_shard(self.n, shard), job)

    def seen(self, job: Job) -> int:
        """How many updates of its stage the weights that a job reads have had.

        Raises PlanError if `version` doesn't return an int from 0 to the number of
        updates before the job's own.
        """
        every = self.update_every
        if not every:
            return 0
        if self.version is None:
            return job.microbatch // every
        return answers.version(self.version, job, every)

    def averages(self, updates: int) -> bool:
        """Whether replicas are averaged after this many updates of a call."""
        return self.average_every is not None and updates % self.average_every == 0

    def updated(self, every: int) -> range:
        """The last microbatch of each update, with an update each `every` of them."""
        return range(every - 1, self.microbatches, every)

    def updater(self, stage: int) -> int | None:
        """The worker that u returns for a stage; None without u.

        Raises PlanError if u doesn't return one worker, the same for all updates.
        """
        if self.u is None:
            return None
        ends = self.updated(self.update_every or self.microbatches)
        return answers.updater(self.u, stage, ends, self.workers)

    def stage_rate(self, stage: int) -> Rate | None:
        """The pair that `rate` returns for a stage, checked; None without `rate`."""
        return None if self.rate is None else answers.rate(self.rate, stage)

    def stage_drift(self, stage: int) -> Drift | None:
        """The pair that `drift` returns for a stage, checked; None without `drift`."""
        return None if self.drift is None else answers.drift(self.drift, stage)

    def gap(self, job: Job) -> float:
        """How many velocities are subtracted from the weights that a job reads."""
        if self.drift is None or job.direction is Direction.FORWARD:
            return 0.0
        drift = self.stage_drift(job.stage)
        return 0.0 if drift is None else drift.gap

    def cap(self, stage: int) -> int | None:
        """The most microbatches of `stage` that may be in flight on one worker."""
        if not callable(self.in_flight):
            return self.in_flight
        return answers.cap(self.in_flight, stage)
