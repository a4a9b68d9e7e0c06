"""The library of schedules: each is one formula for w, one for n, and its source.

In formulas, s is the stage, b the microbatch, d the direction, W the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable

from .jobs import Direction, Placement, PlanError, Priority, Schedule

_Placer = Callable[[int, int], int]


def oldest_microbatch_first(stages: int) -> Priority:
    """Smaller microbatches first; within one, in the order of data flow.

    `oldest_batch_first` of parallelsim (github.com/a-rahimi/parallel-training).
    """

    def n(s: int, b: int, d: Direction) -> int:
        forward = d is Direction.FORWARD
        return 2 * stages * b + (s if forward else 2 * stages - 1 - s)

    return n


def forward_first(microbatches: int) -> Priority:
    """All F before any B; within a direction, smaller microbatches first."""

    def n(s: int, b: int, d: Direction) -> int:
        return b if d is Direction.FORWARD else microbatches + b

    return n


def ddp(workers: int, microbatches: int | None = None) -> Schedule:
    """Every worker keeps all weights, runs whole microbatches: w = (b mod W, b mod W).

    PyTorch Distributed (Li et al. 2020, arXiv 2006.15704).
    """
    microbatches = _multiple("ddp", workers, microbatches)
    return Schedule(
        workers,
        microbatches,
        w=lambda s, b, d: Placement(b % workers, b % workers),
        n=oldest_microbatch_first(workers),
        name="ddp",
    )


def fsdp(workers: int, microbatches: int | None = None) -> Schedule:
    """As ddp, with stage s kept by one worker: w = (s mod W, b mod W).

    ZeRO stage 3 (Rajbhandari et al. 2020, arXiv 1910.02054).
    """
    microbatches = _multiple("fsdp", workers, microbatches)
    return Schedule(
        workers,
        microbatches,
        w=lambda s, b, d: Placement(s % workers, b % workers),
        n=oldest_microbatch_first(workers),
        name="fsdp",
    )


def gpipe(workers: int, microbatches: int) -> Schedule:
    """One stage a worker, w = (s, s); all F before the first B.

    GPipe (Huang et al. 2019, arXiv 1811.06965).
    """
    return Schedule(
        workers,
        microbatches,
        stages=workers,
        w=lambda s, b, d: Placement(s, s),
        n=forward_first(microbatches),
        name="gpipe",
    )


def one_f_one_b(workers: int, microbatches: int) -> Schedule:
    """As gpipe, but B as soon as it can run and at most W - s microbatches in flight.

    PipeDream-Flush (Narayanan et al. 2021, arXiv 2006.09503), DAPPLE (Fan et al. 2021).
    """
    return Schedule(
        workers,
        microbatches,
        stages=workers,
        w=lambda s, b, d: Placement(s, s),
        n=oldest_microbatch_first(workers),
        in_flight=lambda s: workers - s,
        name="1f1b",
    )


def lpp(
    workers: int, group_size: int, microbatches: int, stages: int | None = None
) -> Schedule:
    """Looped pipelines in W / R groups of R workers: w = (h(s, b), h(s, b)).

    h(x, y) = (R y mod W) + (x mod R): microbatch y goes to group y mod (W / R), where
    stage x runs on the group's worker x mod R. stages: W unless given.
    Source: github.com/a-rahimi/parallel-training.
    """
    h = _looped("lpp", workers, group_size)
    stages = workers if stages is None else stages
    return Schedule(
        workers,
        microbatches,
        stages=stages,
        w=lambda s, b, d: Placement(h(s, b), h(s, b)),
        n=oldest_microbatch_first(stages),
        name="lpp",
    )


def fslpp(
    workers: int,
    group_size: int,
    microbatches: int,
    stages: int | None = None,
    even: bool = False,
) -> Schedule:
    """As lpp, with stage s kept by one worker: w = (h(s, s), h(s, b)).

    The published h(s, s) leaves most workers without weights when there are more
    stages than R; even=True keeps stage s on worker s mod W instead.
    Source: github.com/a-rahimi/parallel-training.
    """
    h = _looped("fslpp", workers, group_size)
    stages = workers if stages is None else stages
    return Schedule(
        workers,
        microbatches,
        stages=stages,
        w=lambda s, b, d: Placement(s % workers if even else h(s, s), h(s, b)),
        n=oldest_microbatch_first(stages),
        name="fslpp",
    )


def _looped(name: str, workers: int, group_size: int) -> _Placer:
    _positive(name, workers=workers, group_size=group_size)
    if workers % group_size:
        raise PlanError(
            f"{name}(workers={workers}, group_size={group_size}): the workers don't "
            "divide into groups of that size; give a divisor of workers"
        )
    return lambda x, y: (group_size * y) % workers + x % group_size


def _positive(name: str, **counts: object) -> None:
    for argument, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise PlanError(f"{name}({argument}={count!r}): give an int of 1 or more")


def _multiple(name: str, workers: int, microbatches: int | None) -> int:
    _positive(name, workers=workers)
    if microbatches is None:
        return workers
    _positive(name, microbatches=microbatches)
    if microbatches % workers:
        raise PlanError(
            f"{name}(workers={workers}, microbatches={microbatches}): give a multiple "
            "of workers, so that each has as many microbatches as the others"
        )
    return microbatches
