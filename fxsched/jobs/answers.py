"""What the functions of a schedule answer, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

from .job import ELSEWHERE, Direction, Job, Placement, PlanError
from .user_values import is_count, is_int, is_number, raised

CALLED, OF_STAGE = "(stage, microbatch, direction)", "the number of a stage"

Place = Callable[[int, int, Direction], Placement | tuple[int, int]]
Priority = Callable[[int, int, Direction], int]
Cap = Callable[[int], int | None]
Updater = Callable[[int, int], int]
Version = Callable[[int, int, Direction], int]


class Rate(NamedTuple):
    """How a stage's learning rates begin: update k takes them divided by
    delay ** (1 - min(k / annealed, 1))."""

    delay: float
    annealed: int

    def factor(self, update: int) -> float:
        """What learning rates are multiplied by, for an update counted from 0."""
        return float(self.delay ** (min(update / self.annealed, 1) - 1))


class Drift(NamedTuple):
    """B and W of a stage read weights less `gap` times their velocity, the average of
    the changes of all updates, by which each weighs `decay` times the next."""

    gap: float
    decay: float


Rates = Callable[[int], Rate | tuple[float, int] | None]
Drifts = Callable[[int], Drift | tuple[float, float] | None]


def placement(w: Place, job: Job, workers: int) -> Placement:
    """w of a job. Raises PlanError if it isn't two of the workers, and a place for what
    F saves."""
    answer: Any = _asked(f"w({job})", CALLED, w, *job)
    if not isinstance(answer, tuple) or len(answer) not in (2, 3):
        raise PlanError(
            f"w({job}) returned {answer!r}; return Placement(weights, compute) or "
            "a pair (weight worker, compute worker)"
        )
    keeps, runs, saved = (*answer, None)[:3]
    for verb, worker in (("puts its weights", keeps), ("runs", runs)):
        if not is_int(worker):
            raise PlanError(f"w({job}) {verb} on worker {worker!r}; give an int")
        if not 0 <= worker < workers:
            raise PlanError(
                f"w({job}) {verb} on worker {worker}, but workers are "
                f"0..{workers - 1}; give one of them"
            )
    if is_int(saved) and 0 <= saved < workers:
        return Placement(int(keeps), int(runs), int(saved))
    if saved is not None and saved not in ELSEWHERE:
        raise PlanError(
            f"w({job}) saves what B reads on {saved!r}; give None, one of the workers "
            f"0..{workers - 1}, 'host' or 'disk'"
        )
    return Placement(int(keeps), int(runs), saved)


def priority(n: Priority, job: Job) -> int:
    """n of a job. Raises PlanError if it isn't an int."""
    answer = _asked(f"n({job})", CALLED, n, *job)
    if not is_int(answer):
        raise PlanError(f"n({job}) returned {answer!r}; return an int")
    return int(answer)


def version(function: Version, job: Job, every: int) -> int:
    """How many updates, one for `every` microbatches, a job's weights have seen.

    Raises PlanError if it isn't an int from 0 to the updates before its own.
    """
    most = job.microbatch // every
    answer = _asked(f"version({job})", CALLED, function, *job)
    if not is_int(answer) or not 0 <= answer <= most:
        after = f"{job.stage}U{(most + 1) * every - 1}"
        raise PlanError(
            f"version({job}) returned {answer!r}; return an int from 0 to {most}, "
            f"for {after} waits for {job}, and only {most} updates come before it"
        )
    return int(answer)


def updater(u: Updater, stage: int, ends: Sequence[int], workers: int) -> int:
    """The worker that u names for a stage, whose updates have the numbers `ends`.

    Raises PlanError if it isn't one of the workers, the same for all updates.
    """
    asked = [_updater(u, stage, b, workers) for b in ends]
    for b, worker in zip(ends, asked, strict=True):
        if worker != asked[0]:
            raise PlanError(
                f"u({stage}, {b}) is {worker}, and u({stage}, {ends[0]}) is "
                f"{asked[0]}; the optimizer's state of a stage stays on one worker: "
                "return the same for all microbatches"
            )
    return asked[0]


def _updater(u: Updater, stage: int, b: int, workers: int) -> int:
    worker = _asked(f"u({stage}, {b})", "(stage, microbatch)", u, stage, b)
    if not is_int(worker) or not 0 <= worker < workers:
        raise PlanError(
            f"u({stage}, {b}) returned {worker!r}; return a worker, 0..{workers - 1}"
        )
    return int(worker)


def cap(in_flight: Cap, stage: int) -> int | None:
    """How many microbatches of a stage may be in flight on one worker.

    Raises PlanError if it is neither None nor an int.
    """
    answer: int | None = _asked(f"in_flight({stage})", OF_STAGE, in_flight, stage)
    if answer is not None and not is_int(answer):
        raise PlanError(
            f"in_flight({stage}) returned {answer!r}; return None or an int"
        )
    return answer


def rate(function: Rates, stage: int) -> Rate | None:
    """How the learning rates of a stage begin.

    Raises PlanError if it isn't a delay above 0 and a number of updates, or None.
    """
    answer = _pair(function, "rate", stage)
    if answer is None:
        return None
    delay, annealed = answer
    if not is_number(delay) or not delay or not is_count(annealed, inf):
        raise PlanError(
            f"rate({stage}) returned {answer!r}; return a delay above 0 and the number "
            "of updates until learning rates are whole, 1 or more, or None"
        )
    return Rate(float(delay), int(annealed))


def drift(function: Drifts, stage: int) -> Drift | None:
    """How far B reads a stage's weights from where they are.

    Raises PlanError if it isn't a gap above 0 and a decay between 0 and 1, or None.
    """
    answer = _pair(function, "drift", stage)
    if answer is None:
        return None
    gap, decay = answer
    if not (is_number(gap) and gap and is_number(decay) and 0 < decay < 1):
        raise PlanError(
            f"drift({stage}) returned {answer!r}; return a gap in updates, above 0, "
            "and a decay between 0 and 1, or None"
        )
    return Drift(float(gap), float(decay))


def _pair(function: Callable[[int], Any], name: str, stage: int) -> Any:
    answer = _asked(f"{name}({stage})", OF_STAGE, function, stage)
    if answer is not None and (not isinstance(answer, tuple) or len(answer) != 2):
        raise PlanError(f"{name}({stage}) returned {answer!r}; return a pair, or None")
    return answer


def _asked(
    call: str, called: str, function: Callable[..., Any], *arguments: Any
) -> Any:
    """What a function of the user's says. Raises PlanError where it raises."""
    try:
        return function(*arguments)
    except Exception as error:
        raise raised(call, error, called, function) from error
