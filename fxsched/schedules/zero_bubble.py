"""Pipelines that split B, and run the gradients of weights, W, in the gaps.

p is the number of workers, m that of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable

from ..jobs.job import Direction, Placement
from ..jobs.own_caps import OwnCaps
from ..jobs.schedule import Schedule
from ..jobs.user_values import positive
from .arguments import constructor

FORWARD, BACKWARD, WEIGHT, UPDATE = Direction


@constructor
def zb_h1(workers: int, microbatches: int) -> Schedule:
    """ZB-H1: 1f1b in a fixed order that runs W late, to fill gaps.

    Worker r runs p - r - 1 F first (the warm-up), then rounds of F and B. A round also
    has a W once the warm-up and the rounds before it have p - 1 F together. Every
    worker holds p activations. If F, B and W take equally long, the bubble is a third
    of that of 1f1b.
    Zero Bubble Pipeline Parallelism (Qi et al. 2023, arXiv 2401.10241).
    """
    return _fixed_order("zb_h1", workers, microbatches, 1)


@constructor
def zb_h2(workers: int, microbatches: int) -> Schedule:
    """ZB-H2: as zb_h1 with twice the warm-up, and 2 p - 1 activations.

    Worker r runs 2 (p - r - 1) F first. If F, B and W take equally long, a worker never
    waits once it has begun: steps follow each other without a bubble
    (Simulation.span_bubble_rate).
    Zero Bubble Pipeline Parallelism (Qi et al. 2023, arXiv 2401.10241).
    """
    return _fixed_order("zb_h2", workers, microbatches, 2)


def _fixed_order(name: str, workers: int, microbatches: int, c: int) -> Schedule:
    """n = 3 round + (0 for F, 1 for B, 2 for W), counting rounds from the warm-up."""
    positive(name, workers=workers, microbatches=microbatches)
    warm_up = c * (workers - 1)

    def n(s: int, b: int, d: Direction) -> int:
        if d is FORWARD:
            return 3 * (b + c * s)
        if d is BACKWARD:
            return 3 * (b + warm_up) + 1
        return 3 * (b + warm_up + c * s) + 2

    return Schedule(
        workers,
        microbatches,
        stages=workers,
        w=lambda s, b, d: Placement(s, s),
        n=n,
        in_flight=OwnCaps(lambda s: warm_up + 1),
        name=name,
        split_backward=True,
        in_order=True,
    )


@constructor
def zb_v(workers: int, microbatches: int) -> Schedule:
    """ZB-V: stages as in `folded`, F before B, and W when nothing else can run.

    in_flight is 2 p - 1 - r for the first and r + 1 for the second stage of worker r.
    Each worker thus holds 2 p activations, as much memory as p microbatches of 1f1b,
    whose stages are twice as large. Of two F, or two B, the one of the later stage goes
    first. If F, B and W take 1 and m >= 2 p, a step takes 6 m + p - 1, the least that p
    workers need, or a few units more.
    Qi et al. 2023 (arXiv 2401.10241); V-ZB of Qi et al. 2024 (arXiv 2405.15362).
    """
    positive("zb_v", workers=workers, microbatches=microbatches)
    last = 2 * workers - 1

    def n(s: int, b: int, d: Direction) -> int:
        late = s >= workers
        turns = {FORWARD: 1 - late, BACKWARD: 2 + late}
        return turns.get(d, 4) * microbatches + b

    return Schedule(
        workers,
        microbatches,
        stages=2 * workers,
        w=lambda s, b, d: Placement(*(min(s, last - s),) * 2),
        n=n,
        in_flight=OwnCaps(lambda s: last - s + (s >= workers)),
        name="zb_v",
        split_backward=True,
    )


@constructor
def v_half(workers: int, microbatches: int) -> Schedule:
    """V-Half: stages as in `folded`, and half of the memory of zb_v.

    A worker holds activations of (p + 2) // 2 microbatches. n is the time at which a
    job starts in the published block, which repeats every 6 units. W runs when nothing
    else can. If F, B and W take 1 and m >= 2 p, a step takes less than 6 m + 3 p.
    Pipeline Parallelism with Controllable Memory (Qi et al. 2024, arXiv 2405.15362).
    """
    positive("v_half", workers=workers, microbatches=microbatches)
    p = workers
    gap = 3 if p % 2 == 0 else 0

    def block(r: int) -> tuple[int, ...]:
        return 2 * r, 3 * p - 2 - r, 3 * p - 1 + gap + 2 * r, 6 * p - 2 + gap - r

    return _repeated("v_half", workers, microbatches, block, in_order=False)


@constructor
def v_min(workers: int, microbatches: int) -> Schedule:
    """V-Min: stages as in `folded`, and a third of the memory of zb_v.

    A worker holds activations of (p + 4) // 3 microbatches. n is the time at which a
    job starts in the published block, which repeats every 6 units. The order is fixed,
    since other orders would hold more. If F, B and W take 1, a step takes less than 6 m
    + 4 p.
    Pipeline Parallelism with Controllable Memory (Qi et al. 2024, arXiv 2405.15362).
    """
    positive("v_min", workers=workers, microbatches=microbatches)
    p = workers
    gap = 2 if p % 3 == 0 else 0

    def block(r: int) -> tuple[int, ...]:
        return r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p - 1 + gap - r

    return _repeated("v_min", workers, microbatches, block, in_order=True)


def _repeated(
    name: str,
    workers: int,
    microbatches: int,
    block: Callable[[int], tuple[int, ...]],
    in_order: bool,
) -> Schedule:
    """A block of one microbatch's jobs, again every 6 units for the next.

    block: when worker r starts F of its early and of its late stage, B of the late and
        of the early stage; no two of them equal modulo 6.
    """
    last = 2 * workers - 1
    starts: dict[tuple[int, Direction], int] = {}
    for r in range(workers):
        jobs = [(r, FORWARD), (last - r, FORWARD), (last - r, BACKWARD), (r, BACKWARD)]
        starts |= zip(jobs, block(r), strict=True)
        starts |= zip([(last - r, WEIGHT), (r, WEIGHT)], _gaps(block(r)), strict=True)
    end = max(starts.values()) + 6 * microbatches

    def n(s: int, b: int, d: Direction) -> int:
        fills = d in (WEIGHT, UPDATE) and not in_order
        start = starts[s, WEIGHT if d is UPDATE else d]
        return start + 6 * b + fills * end

    return Schedule(
        workers,
        microbatches,
        stages=2 * workers,
        w=lambda s, b, d: Placement(*(min(s, last - s),) * 2),
        n=n,
        in_flight=OwnCaps(lambda s: (starts[s, WEIGHT] - starts[s, FORWARD]) // 6 + 1),
        name=name,
        split_backward=True,
        in_order=in_order,
    )


def _gaps(block: tuple[int, ...]) -> tuple[int, int]:
    """When W of the late and of the early stage can start, after their B."""
    first, second = sorted(set(range(6)) - {start % 6 for start in block})
    late, early = block[2], block[3]

    def after(start: int, gap: int) -> int:
        return start + 1 + (gap - start - 1) % 6

    pairs = [
        (after(late, first), after(early, second)),
        (after(late, second), after(early, first)),
    ]
    # of two that hold equally much, the one with the late stage first is faster
    return min(pairs, key=lambda pair: (sum(pair), pair))
