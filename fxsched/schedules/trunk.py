"""Encoders beside a trunk on the same workers, as in models that read images or audio.

The trunk is a pipeline over all workers, with the in_flight limits of 1F1B. The
schedules differ in where the encoders run. The graph says which stages are which: the
trunk begins where all inputs have been combined. Each stage is on one worker, so that
no weights are sent. In the papers, encoders may have other pipelines or copies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import networkx as nx

from ..clock.joint import flow_order
from ..clock.stage_graph import run_stages, step_seconds
from ..jobs.answers import Priority
from ..jobs.job import Direction, Placement
from ..jobs.own_caps import OwnCaps
from ..jobs.schedule import Schedule
from ..jobs.user_values import positive
from .arguments import constructor
from .graph_schedule import (
    SIMULATED,
    improved,
    longest_way_first,
    moves_of,
    spread,
    stage_depths,
)
from .orders import forward_first, oldest_microbatch_first

PROBED = (2, 4, 8)  # microbatches for each worker
LOSS = 0.02  # the share by which a step may be longer where encoders hold less
EVEN = 0.05  # by which a worker may have more work than the mean of all
BEFORE = 1 << 40  # more than any n of the orders here


class Layout(NamedTuple):
    """Encoders and trunk on workers: of stage s on worker[s]."""

    stages: nx.DiGraph[int]
    workers: int
    encoders: frozenset[int]
    worker: Sequence[int]


def encoder_stages(stages: nx.DiGraph[int], workers: int) -> frozenset[int]:
    """The stages before the trunk, which begins where what comes from all inputs has
    met: those that some stage without a maker doesn't reach.

    Where there is one such stage, or they never meet, the trunk is the last stages, one
    for each worker.
    """
    reached = dict.fromkeys(stages, 0)
    sources = [s for s in stages if not stages.in_degree(s)]
    for source in sources:
        for s in (source, *nx.descendants(stages, source)):
            reached[s] += 1
    apart = frozenset(s for s, count in reached.items() if count < len(sources))
    if 0 < len(apart) < len(stages):
        return apart
    return frozenset(flow_order(stages)[:-workers])


@constructor
def bubble_filled(workers: int, microbatches: int) -> Schedule:
    """Encoders' jobs run in the bubbles of the trunk.

    Stage t of the trunk runs on worker t mod W. fxsched simulates several placements of
    the encoders' stages, and takes the one with the shortest step. If some worker then
    has over 5 % more work than the mean, as with trained adapters beside a frozen
    trunk, fxsched also tries to move stages of the trunk.

    The trunk runs as 1f1b, with the same in_flight limits, and a worker runs ready jobs
    of the trunk before those of encoders. Encoders have no limits: their F run while
    the trunk's pipeline fills, and their B while it drains, so that an encoder may hold
    the activations of all microbatches. Of an encoder's jobs, the oldest microbatch, F
    before B, or the longest path to the end of the step goes first. fxsched simulates
    all three orders, and takes the one with the shortest step. Optimus (Feng et al.
    2024, arXiv 2408.03505) fills bubbles with kernels instead of stages.
    """
    positive("bubble_filled", workers=workers, microbatches=microbatches)

    def fit(stages: nx.DiGraph[int]) -> Schedule:
        choices = [
            _placed("bubble_filled", layout, microbatches, n, {})
            for layout in _layouts(stages, workers)
            for n in _behind_the_trunk(layout, microbatches)
        ]
        return min(choices, key=lambda each: _seconds(each, stages))

    return Schedule(workers, microbatches, fit=fit, name="bubble_filled")


@constructor
def nested(workers: int, microbatches: int) -> Schedule:
    """Encoders' jobs run between the jobs of the trunk's 1F1B.

    F of an encoder runs just before the trunk needs its output, and B as soon as it is
    ready. So the activations that encoders hold don't grow with the number of
    microbatches.

    Stages are placed as in bubble_filled. A stage of an encoder may have as many
    microbatches in flight as there are stages from it to the end of the model. fxsched
    raises this limit until steps of 2 W, 4 W and 8 W microbatches take at most 2 %
    longer than without it; the limit is the same for any number of microbatches. The
    oldest microbatch, the longest path to the end of the step, or the trunk goes first.
    fxsched simulates all these orders, and takes the one with the shortest step. BigMac
    (Zhang et al. 2026, arXiv 2605.25451), without generators.
    """
    positive("nested", workers=workers, microbatches=microbatches)

    def fit(stages: nx.DiGraph[int]) -> Schedule:
        layouts = _layouts(stages, workers)
        caps = _caps(layouts)
        choices = [
            _placed("nested", layout, microbatches, n, caps)
            for layout in layouts
            for n in _orders(layout, microbatches)
        ]
        return min(choices, key=lambda each: _seconds(each, stages))

    return Schedule(workers, microbatches, fit=fit, name="nested")


def _orders(layout: Layout, microbatches: int) -> list[Priority]:
    """The n that nested compares."""
    plain = [
        oldest_microbatch_first(len(layout.stages)),
        longest_way_first(layout.stages, microbatches),
    ]
    return plain + _behind_the_trunk(layout, microbatches)


def _behind_the_trunk(layout: Layout, microbatches: int) -> list[Priority]:
    """Orders in which the trunk's jobs, the oldest microbatch first, go before all of
    the encoders."""
    oldest = oldest_microbatch_first(len(layout.stages))

    def behind(n: Priority) -> Priority:
        def trunk_first(s: int, b: int, d: Direction) -> int:
            return n(s, b, d) if s in layout.encoders else oldest(s, b, d) - BEFORE

        return trunk_first

    long = longest_way_first(layout.stages, microbatches)
    return [behind(n) for n in (oldest, forward_first(microbatches), long)]


def _caps(layouts: Sequence[Layout]) -> Mapping[int, int]:
    """The least caps of encoders that cost no more than LOSS of a step without them.

    They are the same for any number of microbatches: PROBED a worker are simulated.
    """
    stages, workers, encoders, _ = layouts[0]
    depth = stage_depths(stages)
    counts = [each * workers for each in PROBED]

    def steps(count: int, caps: Mapping[int, int]) -> Iterator[float]:
        for layout in layouts:
            for n in _orders(layout, count):
                yield _seconds(_placed("", layout, count, n, caps), stages)

    def caps(more: int) -> dict[int, int]:
        return {s: depth[s] + more for s in encoders}

    allowed = {count: min(steps(count, {})) * (1 + LOSS) for count in counts}

    def suffice(more: int) -> bool:
        return all(
            any(step <= most for step in steps(count, caps(more)))
            for count, most in allowed.items()
        )

    least, enough = 0, 1
    while enough < counts[-1] and not suffice(enough):
        least, enough = enough + 1, 2 * enough
    return caps(bisect_left(range(enough), True, least, key=suffice))


def _placed(
    name: str, layout: Layout, microbatches: int, n: Priority, caps: Mapping[int, int]
) -> Schedule:
    """caps: of the encoders, which have none where it doesn't say."""
    worker, depth = layout.worker, stage_depths(layout.stages)
    own = {s: depth[s] for s in layout.stages if s not in layout.encoders} | {**caps}
    return Schedule(
        layout.workers,
        microbatches,
        stages=len(layout.stages),
        w=lambda s, b, d: Placement(worker[s], worker[s]),
        n=n,
        in_flight=OwnCaps(own.get),
        name=name,
    )


def _layouts(stages: nx.DiGraph[int], workers: int) -> list[Layout]:
    """The trunk's stages on workers in turns, encoders where the step is shortest; and
    if the work doesn't come out EVEN that way, with the trunk's stages moved too, and
    as `graph` places all of them."""
    encoders = encoder_stages(stages, workers)
    few = 2 * workers
    n = oldest_microbatch_first(len(stages))

    def seconds(worker: Sequence[int]) -> float:
        layout = Layout(stages, workers, encoders, worker)
        return _seconds(_placed("", layout, few, n, {}), stages)

    def moved(starts: Sequence[Sequence[int]], those: Sequence[int]) -> Sequence[int]:
        tries = SIMULATED // (2 * len(stages) * few)
        return improved(starts, moves_of(those, workers), seconds, tries)

    apart = [s for s in flow_order(stages) if s in encoders]
    placed = [moved(_in_turns(stages, workers, encoders), apart)]
    load = _load(stages, workers, placed[0])
    if max(load) > (1 + EVEN) * sum(load) / workers:
        starts = [*placed, *_in_turns(stages, workers, frozenset(stages))]
        placed.append(moved(starts, flow_order(stages)))
        placed.append(spread(stages, workers, few, seconds))
    each = dict.fromkeys(map(tuple, placed))
    return [Layout(stages, workers, encoders, worker) for worker in each]


def _in_turns(
    stages: nx.DiGraph[int], workers: int, encoders: frozenset[int]
) -> list[list[int]]:
    """The trunk's stages on workers in turns; the encoders', the heaviest first, on the
    worker with the least work, or in turns from the first or from the last worker."""
    apart = [s for s in flow_order(stages) if s in encoders]
    trunk = [s for s in flow_order(stages) if s not in encoders]
    load, least = [0.0] * workers, [0] * len(stages)
    for i, s in enumerate(trunk):
        least[s] = i % workers
        load[least[s]] += _work(stages, s)
    turns, back = least.copy(), least.copy()
    for i, s in enumerate(apart):
        turns[s], back[s] = i % workers, -1 - i % workers + workers
    for s in sorted(apart, key=lambda s: -_work(stages, s)):
        least[s] = load.index(min(load))
        load[least[s]] += _work(stages, s)
    return [least, turns, back]


def _load(
    stages: nx.DiGraph[int], workers: int, worker: Sequence[int]
) -> Sequence[float]:
    """The work of each worker."""
    load = [0.0] * workers
    for s in stages:
        load[worker[s]] += _work(stages, s)
    return load


def _work(stages: nx.DiGraph[int], s: int) -> float:
    """Seconds of a stage's F and B, of one microbatch or of a global-batch stage's
    all."""
    seconds: float = stages.nodes[s]["forward"] + stages.nodes[s]["backward"]
    return seconds


def _seconds(schedule: Schedule, stages: nx.DiGraph[int]) -> float:
    """The step; infinite if caps stop it."""
    events = run_stages(schedule, stages)
    return step_seconds(events) if events.complete else float("inf")
