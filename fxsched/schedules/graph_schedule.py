"""A schedule for models with branches, which is fitted to their stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import networkx as nx

from ..clock.joint import flow_order
from ..clock.stage_graph import likely_seconds, run_stages, step_seconds
from ..jobs.answers import Priority
from ..jobs.job import Direction, Placement
from ..jobs.own_caps import OwnCaps
from ..jobs.schedule import Schedule
from ..jobs.user_values import positive
from .arguments import constructor
from .orders import oldest_microbatch_first

# Jobs that `graph` simulates at most to place stages on workers.
SIMULATED = 15_000


@constructor
def graph(workers: int, microbatches: int) -> Schedule:
    """For models with branches: each branch runs on workers of its own.

    Each stage has a worker of its own if there are enough workers. Otherwise stages are
    placed so that the simulated step is shortest. Stages have equal work, so that a
    branch gets workers in proportion to its work. As many microbatches of a stage may
    be in flight as there are stages from it to the end, or one more if transfers would
    otherwise delay the stage. A tree of depth D takes B + D - 1 units of F + B for B
    microbatches; its S stages in a chain would take B + S - 1. n is the oldest
    microbatch first, or the longest path to the end of the step first, whichever has
    the shorter simulated step. GraphPipe (Jeon et al. 2024, arXiv 2406.17145).
    """
    positive("graph", workers=workers, microbatches=microbatches)

    def fit(stages: nx.DiGraph[int]) -> Schedule:
        count = len(stages)
        depth = stage_depths(stages)

        def placed(worker: Sequence[int], n: Priority, more: int) -> Schedule:
            return Schedule(
                workers,
                microbatches,
                stages=count,
                w=lambda s, b, d: Placement(worker[s], worker[s]),
                n=n,
                in_flight=OwnCaps(lambda s: depth[s] + more),
                name="graph",
            )

        oldest = oldest_microbatch_first(count)
        worker = spread(
            stages,
            workers,
            microbatches,
            lambda w: step_seconds(run_stages(placed(w, oldest, 0), stages)),
        )
        best = placed(worker, oldest, 0)
        least = likely_seconds(best, stages)
        for n in (oldest, longest_way_first(stages, microbatches)):
            for more in (0, 1):
                schedule = placed(worker, n, more)
                taken = likely_seconds(schedule, stages)
                if taken < least * 0.97:
                    best, least = schedule, taken
        return best

    return Schedule(workers, microbatches, fit=fit, name="graph")


def stage_depths(stages: nx.DiGraph[int]) -> dict[int, int]:
    """For each stage, how many stages the longest path from it to the end has."""
    depths: dict[int, int] = {}
    for s in reversed(flow_order(stages)):
        depths[s] = 1 + max((depths[r] for r in stages.successors(s)), default=0)
    return depths


def longest_way_first(stages: nx.DiGraph[int], microbatches: int) -> Priority:
    """Jobs with the longest path of work to the end of the step first."""
    data = stages.nodes
    back: dict[int, float] = {}
    for s in flow_order(stages):
        before = max((back[p] for p in stages.predecessors(s)), default=0.0)
        back[s] = data[s]["backward"] + before
    there: dict[int, float] = {}
    for s in reversed(flow_order(stages)):
        after = max((there[r] for r in stages.successors(s)), default=back[s])
        there[s] = data[s]["forward"] + after
    ways = sorted({*back.values(), *there.values()}, reverse=True)
    rank = {way: i for i, way in enumerate(ways)}

    def n(s: int, b: int, d: Direction) -> int:
        way = there[s] if d is Direction.FORWARD else back[s]
        return rank[way] * microbatches + b

    return n


def spread(
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
    moves = moves_of(range(count), workers)
    tries = SIMULATED // (2 * count * microbatches)
    return improved((turns, tuple(least)), moves, seconds, tries)


def moves_of(stages: Sequence[int], workers: int) -> list[tuple[int, int]]:
    """What `improved` may do with these stages."""
    moves = [(s, w) for s in stages for w in range(workers)]
    return moves + [(s, -1 - t) for s in stages for t in stages if t < s]


def improved(
    starts: Sequence[Sequence[int]],
    moves: Sequence[tuple[int, int]],
    seconds: Callable[[Sequence[int]], float],
    tries: int,
) -> Sequence[int]:
    """The best of the starts, each a worker for each stage, after moves that save time.

    moves: a stage with the worker that it moves to, or with -1 - t, for the stage t
    that it changes places with. tries: how many are simulated at most.
    """
    best, worker = min((seconds(w), tuple(w)) for w in starts)
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
            if (time := seconds(new)) < best * (1 - 1e-6):
                worker, best, better = tuple(new), time, True
    return worker
