"""The library of schedules: each is one formula for w, one for n, and its source.

In formulas, s is the stage, b the microbatch, d the direction, W the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import networkx as nx

from .jobs import Direction, Placement, PlanError, Priority, Schedule
from .stages import likely_seconds, run_stages, step_seconds

_Placer = Callable[[int, int], int]

# Jobs that `graph` simulates at most to place stages on workers.
SIMULATED = 15_000


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


def graph(workers: int, microbatches: int) -> Schedule:
    """For models with branches: each stage on a worker of its own where they suffice,
    else spread so that the simulated step is shortest.

    Stages of equal work give a branch workers in proportion to its work. At most as
    many microbatches of a stage are in flight as there are stages from it to the end,
    or one more where transfers would stall it: a tree of depth D takes B + D - 1 units
    of F + B, where its S stages in a chain take B + S - 1. n is the oldest microbatch
    first, or the longest way to the end of the step, whichever simulates faster.
    GraphPipe (Jeon et al. 2024, arXiv 2406.17145).
    """
    _positive("graph", workers=workers, microbatches=microbatches)

    def fit(stages: nx.DiGraph[int]) -> Schedule:
        count = len(stages)
        depth = _depths(stages)

        def placed(worker: Sequence[int], n: Priority, more: int) -> Schedule:
            return Schedule(
                workers,
                microbatches,
                stages=count,
                w=lambda s, b, d: Placement(worker[s], worker[s]),
                n=n,
                in_flight=lambda s: depth[s] + more,
                name="graph",
            )

        oldest = oldest_microbatch_first(count)
        worker = _spread(
            stages,
            workers,
            microbatches,
            lambda w: step_seconds(run_stages(placed(w, oldest, 0), stages)),
        )
        best = placed(worker, oldest, 0)
        least = likely_seconds(best, stages)
        for n in (oldest, _longest_way_first(stages, microbatches)):
            for more in (0, 1):
                found = placed(worker, n, more)
                taken = likely_seconds(found, stages)
                if taken < least * 0.97:
                    best, least = found, taken
        return best

    return Schedule(workers, microbatches, fit=fit, name="graph")


def _depths(stages: nx.DiGraph[int]) -> dict[int, int]:
    """For each stage, how many stages the longest path from it to the end has."""
    found: dict[int, int] = {}
    for s in sorted(stages, reverse=True):
        found[s] = 1 + max((found[r] for r in stages.successors(s)), default=0)
    return found


def _longest_way_first(stages: nx.DiGraph[int], microbatches: int) -> Priority:
    """Jobs with the longest path of work to the end of the step first."""
    data = stages.nodes
    back: dict[int, float] = {}
    for s in sorted(stages):
        before = max((back[p] for p in stages.predecessors(s)), default=0.0)
        back[s] = data[s]["backward"] + before
    there: dict[int, float] = {}
    for s in sorted(stages, reverse=True):
        after = max((there[r] for r in stages.successors(s)), default=back[s])
        there[s] = data[s]["forward"] + after
    ways = sorted({*back.values(), *there.values()}, reverse=True)
    rank = {way: i for i, way in enumerate(ways)}

    def n(s: int, b: int, d: Direction) -> int:
        way = there[s] if d is Direction.FORWARD else back[s]
        return rank[way] * microbatches + b

    return n


def _spread(
    stages: nx.DiGraph[int],
    workers: int,
    microbatches: int,
    seconds: Callable[[Sequence[int]], float],
) -> Sequence[int]:
    """A worker for each stage: in turns, or the one with the least work; then stages
    are moved and swapped while that saves time."""
    count = len(stages)
    turns = tuple(s % workers for s in range(count))
    if count <= workers:
        return turns
    load = [0.0] * workers
    least = []
    for s in range(count):
        least.append(load.index(min(load)))
        load[least[s]] += stages.nodes[s]["forward"] + stages.nodes[s]["backward"]
    best, worker = min((seconds(w), w) for w in (turns, tuple(least)))
    tries = SIMULATED // (2 * count * microbatches)
    moves = [(s, w) for s in range(count) for w in range(workers)]
    moves += [(s, -1 - t) for s in range(count) for t in range(s)]
    better = True
    while better:
        better = False
        for s, other in moves:
            new = list(worker)
            new[s] = other if other >= 0 else worker[-1 - other]
            if other < 0:
                new[-1 - other] = worker[s]
            if tuple(new) == worker:
                continue
            tries -= 1
            if tries < 0:
                return worker
            if (found := seconds(new)) < best * (1 - 1e-6):
                worker, best, better = tuple(new), found, True
    return worker


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
