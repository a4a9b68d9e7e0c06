"""Refuses models that add totals of the whole batch to what they keep.

Where inputs alone decide what weighs a loss, it is computed for the whole batch before
the step; each microbatch would add it to the model's state again.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..ir.graphs import Role, ancestors, name_of
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from .microbatch import Microbatch
from .returns import Returned
from .weighted_microbatch import WeightedMicrobatch


def refuse_kept_totals(trace: Microbatch) -> None:
    """Raises PlanError where state becomes what it was and such a total."""
    if not isinstance(trace, WeightedMicrobatch) or not trace.totals:
        return
    totals = set(trace.totals.values())
    state = set(trace.graph.find_nodes(op="placeholder"))
    state -= {n for n in state if n.meta["role"] is Role.BATCH} | totals
    kept = {node: node.all_input_nodes for node in trace.graph.nodes}
    kept = {node: reads for node, reads in kept.items() if node.meta.get("mutates")}
    for node in kept:
        if name_of(node.target) == "copy_":
            kept[node] = kept[node][1:]  # not what it writes over
    returns: Sequence[Returned] = trace.gm.meta["returns"]
    for old, returned in zip(trace.outputs(), returns, strict=True):
        new = trace.new.get(old) if isinstance(old, fx.Node) else None
        if returned.replaces and isinstance(new, fx.Node):
            kept[new] = [new]
    for node, reads in kept.items():
        sources = ancestors(reads)
        if sources & totals and sources & state:
            raise _kept(node)


def _kept(node: fx.Node) -> PlanError:
    return PlanError(
        "the model adds what inputs alone decide, a total of the whole batch, to what "
        f"it keeps{line_of(node.meta.get('stack_trace'))}\n  each microbatch would add "
        "it again: compute it after the call, or write "
        'fxsched.backend(schedule, loss_reduction="mean")'
    )
