"""The words of fxsched: jobs, where they are placed, in which order, and a schedule."""

from __future__ import annotations

import json
import operator
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from math import inf
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import networkx as nx

SAVED = 1  # version of the files that Schedule.save writes
PROBED = 8  # stages of a schedule that leaves their number to the planner
LARGEST = 100_000  # workers, microbatches or stages


class PlanError(Exception):
    """Something the user asked for that cannot be planned; the message says what."""


class Direction(Enum):
    """Forward, backward, weight gradients, or update; `value` is the letter that jobs
    print with. Where a schedule splits the backward, B makes the gradients of a stage's
    inputs and W those of its weights; else B makes both and there is no W. U is a step
    of the optimizer, with the gradients since the last one.

    Its letter is equal to it, in `d == "B"`, `d in ("B", "W")` and as a key. Any other
    text raises PlanError there, where it would be unequal in silence.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    UPDATE = "U"

    def __str__(self) -> str:
        return self.value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return self is other
        if other not in ("F", "B", "W", "U"):
            raise PlanError(
                f"a direction is compared with {other!r}; compare it with 'F', 'B', "
                "'W' or 'U', or with Direction.FORWARD, BACKWARD, WEIGHT or UPDATE"
            )
        return bool(self._value_ == other)

    def __hash__(self) -> int:
        return hash(self._value_)


class Job(NamedTuple):
    """The work of one stage on one microbatch in one direction; prints as `2F0`."""

    stage: int
    microbatch: int
    direction: Direction

    def __str__(self) -> str:
        return f"{self.stage}{self.direction.value}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Job:
        """The job that prints as `text`.

        Raises PlanError if the text isn't a stage, F, B, W or U, and a microbatch.
        """
        match = re.fullmatch(r"(\d+)([FBWU])(\d+)", text)
        if match is None:
            raise PlanError(
                f"{text!r} is not a job: write stage, F, B, W or U, microbatch, as in "
                "2F0"
            )
        stage, letter, microbatch = match.groups()
        return Job(int(stage), int(microbatch), Direction(letter))


class Placement(NamedTuple):
    """The worker that keeps the weights of a job and the worker that runs it."""

    weights: int
    compute: int


CALLED = "(stage, microbatch, direction)"

Place = Callable[[int, int, Direction], Placement | tuple[int, int]]
Priority = Callable[[int, int, Direction], int]
InFlight = int | Callable[[int], int | None] | None
Updater = Callable[[int, int], int]
Version = Callable[[int, int, Direction], int]


@dataclass(frozen=True)
class Schedule:
    """A parallelism scheme: where every job runs (w) and which goes first (n).

    workers: how many workers there are, numbered from 0.
    microbatches: how many equal parts a batch is cut into along dimension 0.
    stages: how many stages the model is cut into; None leaves it to the planner: the
        multiple of the workers with the shortest predicted step; the least from eight
        on, where w is the same for all stages.
    w(s, b, d): Placement, or a pair (weight worker, compute worker).
    n(s, b, d): an int; of the jobs that are ready a worker takes the smallest.
    in_flight: how many microbatches of a stage may be between F and B (W, if the
        backward is split) on one worker (the one that holds the activations, where B
        runs): None for no limit, an int, or a function of the stage.
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

    def __post_init__(self) -> None:
        for field in ("workers", "microbatches", "stages"):
            count = getattr(self, field)
            if field == "stages" and count is None:
                continue
            if not is_count(count):
                raise PlanError(
                    f"Schedule({field}={count!r}): give an int of 1 or more"
                    f"{too_many(count)}"
                )
            object.__setattr__(self, field, int(count))  # numpy's ints too
        if self.fit is not None and not callable(self.fit):
            raise PlanError(
                f"Schedule(fit={self.fit!r}): give a function of the stages that "
                "returns a Schedule"
            )
        for field in ("w", "n"):
            if not callable(getattr(self, field)):
                raise PlanError(
                    f"Schedule({field}={getattr(self, field)!r}): give a function of "
                    "(stage, microbatch, direction)"
                )
        if self.u is not None and not callable(self.u):
            raise PlanError(
                f"Schedule(u={self.u!r}): give a function of (stage, microbatch), or "
                "None"
            )
        if self.version is not None and not callable(self.version):
            raise PlanError(
                f"Schedule(version={self.version!r}): give a function of (stage, "
                "microbatch, direction), or None"
            )
        self._check_update_every()
        for field in ("split_backward", "in_order"):
            if not isinstance(getattr(self, field), bool):
                raise PlanError(
                    f"Schedule({field}={getattr(self, field)!r}): give True or False"
                )
        cap = self.in_flight
        if cap is not None and not callable(cap) and not is_count(cap, inf):
            raise PlanError(
                f"Schedule(in_flight={cap!r}): give None, an int of 1 or more, or a "
                "function of the stage"
            )
        if cap is not None and not callable(cap):
            object.__setattr__(self, "in_flight", int(cap))

    def _check_update_every(self) -> None:
        every = self.update_every
        if every is None:
            return
        if not is_count(every) or self.microbatches % every:
            raise PlanError(
                f"Schedule(update_every={every!r}): give an int of 1 or more that "
                f"divides the {self.microbatches} microbatches, or None"
            )
        object.__setattr__(self, "update_every", int(every))

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
            raise PlanError(f"rank {rank!r}: workers are 0..{self.workers - 1}")
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

        Raises PlanError where the stages are open, and for a wrong w, n or path.
        """
        if self.stages is None or self.fit is not None:
            raise PlanError(
                f"save: {self} leaves its stages to the planner; save plan.schedule, "
                "or dataclasses.replace(schedule, stages=4)"
            )
        stages, every = range(self.stages), range(self.microbatches)
        jobs = [Job(s, b, d) for s in stages for b in every for d in self.directions]
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
        if self.version is not None:
            record["versions"] = {str(job): self.seen(job) for job in jobs}
        try:
            Path(path).write_text(json.dumps(record) + "\n", "utf-8")
        except OSError as error:
            raise PlanError(f"{path} can't be written: {error.strerror}") from error

    def place(self, job: Job) -> Placement:
        """w of a job, checked. Raises PlanError if it isn't two workers in range."""
        try:
            answer = self.w(*job)
        except Exception as error:
            raise raised(f"w({job})", error, CALLED) from error
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise PlanError(
                f"w({job}) returned {answer!r}; return Placement(weights, compute) or "
                "a pair (weight worker, compute worker)"
            )
        for verb, worker in zip(("puts its weights", "runs"), answer, strict=True):
            if not is_int(worker):
                raise PlanError(
                    f"w({job}) {verb} on worker {worker!r}, which is not an int"
                )
            if not 0 <= worker < self.workers:
                raise PlanError(
                    f"w({job}) {verb} on worker {worker}, but workers are "
                    f"0..{self.workers - 1}"
                )
        return Placement(int(answer[0]), int(answer[1]))

    def priority(self, job: Job) -> int:
        """n of a job, checked. Raises PlanError if it isn't an int."""
        try:
            answer = self.n(*job)
        except Exception as error:
            raise raised(f"n({job})", error, CALLED) from error
        if not is_int(answer):
            raise PlanError(f"n({job}) returned {answer!r}; return an int")
        return int(answer)

    def seen(self, job: Job) -> int:
        """How many updates of its stage a job's weights have seen, checked.

        Raises PlanError if it isn't an int from 0 to the updates before its own.
        """
        most = job.microbatch // self.update_every if self.update_every else 0
        if self.version is None or not self.update_every:
            return most
        try:
            answer = self.version(*job)
        except Exception as error:
            raise raised(f"version({job})", error, CALLED) from error
        if not is_int(answer) or not 0 <= answer <= most:
            after = f"{job.stage}U{(most + 1) * self.update_every - 1}"
            raise PlanError(
                f"version({job}) returned {answer!r}; return an int from 0 to {most}, "
                f"for {after} waits for {job}, and only {most} updates come before it"
            )
        return int(answer)

    def updated(self, every: int) -> range:
        """The microbatches that updates are numbered by, one for each `every`."""
        return range(every - 1, self.microbatches, every)

    def updater(self, stage: int) -> int | None:
        """The worker that u names for a stage; None without u.

        Raises PlanError if it isn't one worker, the same for all updates.
        """
        if self.u is None:
            return None
        every = self.update_every or self.microbatches
        first: Any = None
        for b in self.updated(every):
            try:
                worker = self.u(stage, b)
            except Exception as error:
                called = "(stage, microbatch)"
                raise raised(f"u({stage}, {b})", error, called) from error
            if not is_int(worker) or not 0 <= worker < self.workers:
                raise PlanError(
                    f"u({stage}, {b}) returned {worker!r}; return a worker, "
                    f"0..{self.workers - 1}"
                )
            first = worker if first is None else first
            if worker != first:
                raise PlanError(
                    f"u({stage}, {b}) is {worker}, and u({stage}, {every - 1}) is "
                    f"{first}; the optimizer's state of a stage stays on one worker: "
                    "return the same for all microbatches"
                )
        return int(first)

    def cap(self, stage: int) -> int | None:
        """How many microbatches of `stage` may be in flight on one worker."""
        if not callable(self.in_flight):
            return self.in_flight
        try:
            answer = self.in_flight(stage)
        except Exception as error:
            called = "the number of a stage"
            raise raised(f"in_flight({stage})", error, called) from error
        if answer is not None and not is_int(answer):
            raise PlanError(
                f"in_flight({stage}) returned {answer!r}; return None or an int"
            )
        return answer


def is_int(value: object) -> bool:
    """Whether a user's number is an int (numpy's too), but not a bool."""
    try:
        operator.index(value)  # type: ignore[arg-type]  # refuses most arrays
    except (TypeError, ValueError, RuntimeError):
        return False
    return not isinstance(value, bool)


def is_count(value: object, most: float = LARGEST) -> bool:
    """Whether a user's number is an int of 1 or more, and no more than `most`."""
    return is_int(value) and 1 <= operator.index(value) <= most  # type: ignore[arg-type]


def too_many(value: object) -> str:
    """What to add to an error about a count: the most there can be."""
    return f", {LARGEST:,} at most" if is_count(value, inf) else ""


def is_number(value: object, least: float = 0.0) -> bool:
    """Whether a user's number is one (not an array, nor True), finite, and not below
    `least`."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    return real and least <= float(value) < inf  # type: ignore[arg-type]


def raised(call: str, error: Exception, arguments: str) -> PlanError:
    """The error for a function of the user's that raised: which call, what and where.

    arguments: what it is called with.
    """
    if isinstance(error, PlanError):
        return error
    frames = traceback.extract_tb(error.__traceback__)[1:]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return PlanError(
        f"{call} raised {type(error).__name__}: {error}{where}; it is called with "
        f"{arguments}"
    )
