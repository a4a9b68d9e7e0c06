"""Pipelines with several stages per worker: stage s runs on worker s mod W."""

from __future__ import annotations

from collections.abc import Callable

from ..jobs.job import Direction, Placement
from ..jobs.own_caps import OwnCaps
from ..jobs.schedule import Schedule
from ..jobs.user_values import flag, positive
from .arguments import constructor, equal_shares, groups, loops
from .orders import oldest_microbatch_first

FORWARD = Direction.FORWARD
_Placer = Callable[[int, int], int]


@constructor
def looped_bfs(workers: int, microbatches: int, stages: int | None = None) -> Schedule:
    """Breadth first: all microbatches run through one stage of a worker, then the next.

    Of the jobs that are ready, F goes before B. By default two stages per worker.

    With v stages per worker a step takes m v + W - 1 units of one stage's F + B, and a
    worker holds m v activations. Compared with looped_dfs, a worker's next job is more
    often of the same stage, so that weights that another worker keeps are fetched once
    for each stage. Breadth-First Pipeline Parallelism (Lamy-Poirier 2022, arXiv
    2211.05953).
    """
    positive("looped_bfs", workers=workers, microbatches=microbatches)
    v = loops("looped_bfs", workers, stages)

    def n(s: int, b: int, d: Direction) -> int:
        loop = s // workers if d is FORWARD else 2 * v - 1 - s // workers
        return loop * microbatches + b

    return Schedule(
        workers,
        microbatches,
        stages=v * workers,
        w=lambda s, b, d: Placement(s % workers, s % workers),
        n=n,
        name="looped_bfs",
    )


@constructor
def looped_dfs(workers: int, microbatches: int, stages: int | None = None) -> Schedule:
    """Depth first: W microbatches run through all stages before the next W.

    in_flight limits this order, and B runs when no F may. By default two stages per
    worker.

    looped_dfs has the same rule as `interleaved`, but no fixed order, and allows any
    number of microbatches. Its step is a few percent longer, and it holds a few more
    activations. At most 2 W microbatches of a stage are in flight, and at most S - s of
    stage s. Described in Breadth-First Pipeline Parallelism (Lamy-Poirier 2022, arXiv
    2211.05953).
    """
    positive("looped_dfs", workers=workers, microbatches=microbatches)
    v = loops("looped_dfs", workers, stages)

    def n(s: int, b: int, d: Direction) -> int:
        turn = _turn(s // workers, b, d, workers, v)
        return turn if d is FORWARD else (microbatches + workers) * v + turn

    return Schedule(
        workers,
        microbatches,
        stages=v * workers,
        w=lambda s, b, d: Placement(s % workers, s % workers),
        n=n,
        in_flight=OwnCaps(lambda s: min(2 * workers, v * workers - s)),
        name="looped_dfs",
    )


@constructor
def interleaved(
    workers: int, microbatches: int | None = None, stages: int | None = None
) -> Schedule:
    """Interleaved 1F1B, in its fixed order. By default two stages per worker.

    Worker r first runs 2 (W - r - 1) + (v - 1) W F in depth-first order, then one F and
    one B in turns, then the remaining B; n counts these turns. With v stages per worker
    a step takes m v + W - 1 units of one stage's F + B: a bubble v times smaller than
    that of 1f1b. Worker r holds 2 (W - r - 1) + (v - 1) W + 1 activations. The number
    of microbatches m must be a multiple of W.
    Megatron-LM (Narayanan et al. 2021, arXiv 2104.04473).
    """
    why = "as its order goes in rounds of as many microbatches as workers"
    microbatches = equal_shares("interleaved", workers, microbatches, why)
    v = loops("interleaved", workers, stages)

    def n(s: int, b: int, d: Direction) -> int:
        turn = _turn(s // workers, b, d, workers, v)
        if d is FORWARD:
            return 2 * (turn + 2 * (s % workers))
        return 2 * (turn + 2 * (workers - 1) + (v - 1) * workers) + 1

    return Schedule(
        workers,
        microbatches,
        stages=v * workers,
        w=lambda s, b, d: Placement(s % workers, s % workers),
        n=n,
        name="interleaved",
        in_order=True,
    )


def _turn(loop: int, b: int, d: Direction, workers: int, v: int) -> int:
    """Which of a worker's jobs of a direction this is, depth first."""
    if d is not FORWARD:
        loop = v - 1 - loop
    return (b // workers * v + loop) * workers + b % workers


@constructor
def lpp(
    workers: int, group_size: int, microbatches: int, stages: int | None = None
) -> Schedule:
    """Looped pipelines in W / R groups of R workers: w = (h(s, b), h(s, b)).

    h(x, y) = (R y mod W) + (x mod R): microbatch y goes to group y mod (W / R), where
    stage x runs on the group's worker x mod R. stages: W by default.
    Source: github.com/a-rahimi/parallel-training.
    """
    h = _hash("lpp", workers, group_size)
    stages = workers if stages is None else stages
    positive("lpp", microbatches=microbatches, stages=stages)
    return Schedule(
        workers,
        microbatches,
        stages=stages,
        w=lambda s, b, d: Placement(h(s, b), h(s, b)),
        n=oldest_microbatch_first(stages),
        name="lpp",
    )


@constructor
def fslpp(
    workers: int,
    group_size: int,
    microbatches: int,
    stages: int | None = None,
    even: bool = False,
) -> Schedule:
    """As lpp, but one worker keeps stage s: w = (h(s, s), h(s, b)).

    With the published h(s, s), most workers keep no weights if there are more stages
    than R. even=True keeps stage s on worker s mod W instead.
    Source: github.com/a-rahimi/parallel-training.
    """
    h = _hash("fslpp", workers, group_size)
    stages = workers if stages is None else stages
    positive("fslpp", microbatches=microbatches, stages=stages)
    flag("fslpp", even=even)
    return Schedule(
        workers,
        microbatches,
        stages=stages,
        w=lambda s, b, d: Placement(s % workers if even else h(s, s), h(s, b)),
        n=oldest_microbatch_first(stages),
        name="fslpp",
    )


def _hash(name: str, workers: int, group_size: int) -> _Placer:
    groups(name, workers, group_size)
    return lambda x, y: (group_size * y) % workers + x % group_size
