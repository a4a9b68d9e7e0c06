"""The schedule that the planner finds for a model."""

from __future__ import annotations

import networkx as nx

from ..clock.stage_graph import likely_seconds
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import flag, positive
from .arguments import constructor
from .data_parallel import ddp, fsdp, hsdp
from .graph_schedule import graph
from .looped import interleaved, looped_bfs, looped_dfs
from .pipelines import folded, gpipe, one_f_one_b
from .trunk import bubble_filled, nested
from .zero_bubble import v_half, v_min, zb_h1, zb_h2, zb_v

FIRST = (
    graph,
    one_f_one_b,
    gpipe,
    interleaved,
    looped_bfs,
    looped_dfs,
    folded,
    bubble_filled,
    nested,
    ddp,
    fsdp,
)
SPLIT = (zb_h1, zb_h2, zb_v, v_half, v_min)


@constructor
def auto(workers: int, microbatches: int, split_backward: bool = False) -> Schedule:
    """The planner cuts the model and places its stages at the same time.

    It plans the schedules of the library, each with its own cut, and takes the one with
    the shortest predicted step. By simulated annealing it then moves blocks between
    stages, and stages between workers; it cuts stages in two, joins them, and has
    several workers compute a stage in turns; where there are few jobs, it moves single
    jobs. plan.explain() lists what was compared.

    Without a memory limit, no worker holds more than a tenth above what one holds under
    graph. On stages that are there already, as those of backend(stages=) or simulate,
    the best schedule of the library is taken.

    split_backward: whether B and W are separate jobs.
    """
    positive("auto", workers=workers, microbatches=microbatches)
    flag("auto", split_backward=split_backward)
    candidates = []
    for make in (*FIRST, *(SPLIT * split_backward)):
        try:
            candidates.append(make(workers, microbatches))
        except PlanError:
            continue  # such as one for several times as many microbatches
    for size in (k for k in range(2, workers) if workers % k == 0):
        try:
            candidates.append(hsdp(workers, size, microbatches))
        except PlanError:
            continue

    def fit(stages: nx.DiGraph[int]) -> Schedule:
        able = [c.fitted(stages) for c in candidates if c.stages in (None, len(stages))]
        return min(able, key=lambda each: likely_seconds(each, stages))

    return Schedule(
        workers,
        microbatches,
        fit=fit,
        name="auto",
        split_backward=split_backward,
        candidates=tuple(candidates),
    )
