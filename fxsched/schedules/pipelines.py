"""Pipelines with one stage per worker, and variants that move some of the work."""

from __future__ import annotations

from ..jobs.job import Direction, Placement, PlanError
from ..jobs.own_caps import OwnCaps
from ..jobs.schedule import Schedule
from ..jobs.user_values import positive
from .arguments import constructor
from .orders import forward_first, oldest_microbatch_first

FORWARD, BACKWARD, *_ = Direction


@constructor
def naive(workers: int, microbatches: int = 1) -> Schedule:
    """One stage per worker and one microbatch at a time: w = (s, s), in_flight = 1.

    Only one worker is busy at any time. Model parallelism as in Krizhevsky 2014 (arXiv
    1404.5997), which GPipe starts from.
    """
    positive("naive", workers=workers, microbatches=microbatches)
    return Schedule(
        workers,
        microbatches,
        stages=workers,
        w=lambda s, b, d: Placement(s, s),
        n=oldest_microbatch_first(workers),
        in_flight=OwnCaps(lambda s: 1),
        name="naive",
    )


@constructor
def gpipe(workers: int, microbatches: int) -> Schedule:
    """One stage per worker, w = (s, s); of the jobs that are ready, F goes before B.

    GPipe (Huang et al. 2019, arXiv 1811.06965).
    """
    positive("gpipe", workers=workers, microbatches=microbatches)
    return Schedule(
        workers,
        microbatches,
        stages=workers,
        w=lambda s, b, d: Placement(s, s),
        n=forward_first(microbatches),
        name="gpipe",
    )


@constructor
def one_f_one_b(workers: int, microbatches: int, ahead: int = 1) -> Schedule:
    """As gpipe, but B runs as soon as it can, and in_flight is W - s.

    PipeDream-Flush (Narayanan et al. 2021, arXiv 2006.09503), DAPPLE (Fan et al. 2021).

    ahead: how many more microbatches stage s may have in flight than stage s + 1. With
        2, stage s may have 2 (W - s) - 1, so that its worker has jobs left while a
        transfer or a slow job delays its next B (Eager-1F1B, Zhuang et al. 2023, arXiv
        2211.05322).
    """
    positive("one_f_one_b", workers=workers, microbatches=microbatches, ahead=ahead)
    return Schedule(
        workers,
        microbatches,
        stages=workers,
        w=lambda s, b, d: Placement(s, s),
        n=oldest_microbatch_first(workers),
        in_flight=OwnCaps(lambda s: ahead * (workers - 1 - s) + 1),
        name="1f1b",
    )


@constructor
def folded(workers: int, microbatches: int, held: int | None = None) -> Schedule:
    """Two stages per worker, the first with the last: s on min(s, 2 W - 1 - s).

    An activation of stage s is held while S - s stages run. At full speed each worker
    therefore needs room for S + 1 = 2 W + 1 activations. In 1f1b the first worker needs
    room for 2 W activations of the same size, and later workers for fewer.

    held: the room of a worker in activations, by default S + 1. The later of its two
        stages gets the room that it needs of this, rounded up, and the earlier stage
        gets the rest.
    The placement is that of the V schedules (Qi et al. 2024, arXiv 2405.15362), which
    split B. Here B is not split, and F goes first if there is room.
    """
    positive("folded", workers=workers, microbatches=microbatches)
    stages = 2 * workers
    room = stages + 1 if held is None else held
    if isinstance(room, bool) or not isinstance(room, int) or room < 2:
        raise PlanError(
            f"folded(held={held!r}): give an int of 2 or more, one for each of a "
            "worker's two stages"
        )

    def in_flight(s: int) -> int:
        late = -(-room * (min(s, stages - 1 - s) + 1) // (stages + 1))
        return late if s >= workers else room - late

    return Schedule(
        workers,
        microbatches,
        stages=stages,
        w=lambda s, b, d: Placement(*(min(s, stages - 1 - s),) * 2),
        n=forward_first(microbatches),
        in_flight=OwnCaps(in_flight),
        name="folded",
    )


@constructor
def cuckoo(workers: int, microbatches: int) -> Schedule:
    """As 1f1b without caps, but late workers run early stages' B of first microbatches.

    Late workers have finished their F first. B runs on worker W - 1 - s if s < W // 2 +
    2 and b < B // 2 - 2, where B is the number of microbatches.

    F and B of such a stage run on different workers, so that the tensors that F saved
    are sent, and B fetches the weights.
    Source: the notebook of github.com/a-rahimi/parallel-training.
    """
    positive("cuckoo", workers=workers, microbatches=microbatches)

    def w(s: int, b: int, d: Direction) -> Placement:
        laid = d is BACKWARD and s < workers // 2 + 2 and b < microbatches // 2 - 2
        return Placement(s, workers - 1 - s if laid else s)

    return Schedule(
        workers,
        microbatches,
        stages=workers,
        w=w,
        n=oldest_microbatch_first(workers),
        name="cuckoo",
    )


@constructor
def overflow(workers: int, microbatches: int, stages: int | None = None) -> Schedule:
    """1f1b on S workers, with extra workers for jobs whose activations don't fit.

    In 1f1b, stage s has S - s microbatches in flight. Here the first S workers have
    room for fewer: `room` activations, the smallest number that suffices on the W - S
    extra workers too. Stage s with S - s > room keeps microbatches with b mod S < room.
    The jobs of other microbatches run on extra worker S + (b mod S - room) mod (W - S).
    Weights stay on worker s. With S - room or more extra workers a step takes as long
    as in 1f1b. n is the order of 1f1b, and workers follow it strictly, because nothing
    else limits the activations of extra workers. stages: S, by default 2 W / 3.
    """
    positive("overflow", workers=workers, microbatches=microbatches)
    if stages is None:
        stages = max(1, 2 * workers // 3)
    positive("overflow", stages=stages)
    extra, count = workers - stages, stages
    if extra < 1:
        raise PlanError(
            f"overflow(workers={workers}, stages={stages}): give workers={stages + 1} "
            "or more, one for each stage and one or more extra workers"
        )
    room = next(r for r in range(1, count + 1) if _overflown(count, extra, r) <= r)

    def w(s: int, b: int, d: Direction) -> Placement:
        over = b % count - room
        here = over < 0 or count - s <= room
        return Placement(s, s if here else count + over % extra)

    return Schedule(
        workers,
        microbatches,
        stages=count,
        w=w,
        n=lambda s, b, d: 2 * (b + s) if d is FORWARD else 2 * (b + count) - 1,
        name="overflow",
        in_order=True,
    )


def _overflown(stages: int, extra: int, room: int) -> int:
    """The most activations of an extra worker, if the others have room for `room`."""
    over = stages - room
    return over * -(-over // extra)
