"""Pipelines: one stage a worker, and what becomes of it when work is moved."""

from __future__ import annotations

from ..jobs.job import Direction, Placement, PlanError
from ..jobs.own_caps import OwnCaps
from ..jobs.schedule import Schedule
from .arguments import positive
from .orders import forward_first, oldest_microbatch_first

FORWARD, BACKWARD, *_ = Direction


def naive(workers: int, microbatches: int = 1) -> Schedule:
    """One stage a worker, one microbatch at a time: w = (s, s), and a cap of 1.

    One worker is busy at any time. Model parallelism as in Krizhevsky 2014 (arXiv
    1404.5997), the case that GPipe starts from.
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


def gpipe(workers: int, microbatches: int) -> Schedule:
    """One stage a worker, w = (s, s); of jobs that are ready, F before B.

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


def one_f_one_b(workers: int, microbatches: int, ahead: int = 1) -> Schedule:
    """As gpipe, but B as soon as it can run and at most W - s microbatches in flight.

    PipeDream-Flush (Narayanan et al. 2021, arXiv 2006.09503), DAPPLE (Fan et al. 2021).
    ahead: so many more microbatches for each worker further on. With 2, a worker has
    jobs left while a transfer or a slow job holds up its next B, at 2 (W - s) - 1
    activations (Eager-1F1B, Zhuang et al. 2023, arXiv 2211.05322).
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


def folded(workers: int, microbatches: int, held: int | None = None) -> Schedule:
    """Two stages a worker, the first with the last: stage s on min(s, 2 W - 1 - s).

    An activation of stage s is held for S - s stages' work, so a pair needs room for
    S + 1 = 2 W + 1 of them at full speed, on every worker alike; 1f1b needs 2 W of the
    same size, but on its first worker. held: the room that a worker has, S + 1 unless
    given; the last stages get what they need of it, rounded up, the first the rest.
    The placement is that of the V schedules (Qi et al. 2024, arXiv 2405.15362), which
    differ in splitting B; here B is whole, and F goes first where there is room.
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


def cuckoo(workers: int, microbatches: int) -> Schedule:
    """As gpipe, but the first microbatches' B of early stages run on late workers,
    which are done with F first: on W - 1 - s, for s < W // 2 + 2, b < B // 2 - 2.

    F and B of such a stage run on different workers, so what F saved travels, and B
    fetches the weights.
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


def overflow(workers: int, microbatches: int, stages: int | None = None) -> Schedule:
    """1f1b on S workers that have no room for W - s microbatches in flight: of every S
    microbatches the last are an extra worker's until the stages that have room.

    room is the smallest that suffices, on the W - S extra workers too. Stage s with
    S - s > room keeps microbatches b mod S < room; the others' jobs run on extra
    worker S + (b mod S - room) mod (W - S). Weights stay on worker s. With S - room or
    more extra workers a step takes as long as 1f1b. n is 1f1b's order, kept strictly:
    nothing else bounds what the extra workers hold. stages: 2 W / 3 unless given.
    """
    positive("overflow", workers=workers, microbatches=microbatches)
    if stages is None:
        stages = max(1, 2 * workers // 3)
    positive("overflow", stages=stages)
    extra, count = workers - stages, stages
    if extra < 1:
        raise PlanError(
            f"overflow(workers={workers}, stages={stages}): there must be a worker for "
            "each stage, and one or more extra workers; give fewer stages, or more "
            "workers"
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
