"""Refuses models that add totals of the whole batch to what they keep.

Where inputs alone decide what weighs a loss, it is computed for the whole batch before
the step; each microbatch would add it to the model's state again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from torch import Tensor, fx

from ..ir.graphs import Role, name_of, storage, tensors
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from .microbatch import Microbatch
from .returns import Returned
from .weighted_microbatch import WeightedMicrobatch

SETS = ("copy_", "fill_")  # write over what was there


def refuse_kept_totals(trace: Microbatch) -> None:
    """Raises PlanError where state becomes what it was and such a total."""
    if not isinstance(trace, WeightedMicrobatch) or not trace.totals:
        return
    state = [
        node
        for node in trace.graph.find_nodes(op="placeholder")
        if node.meta["role"] is not Role.BATCH and node not in trace.totals
    ]
    of_totals = _reached(trace.graph, trace.totals)
    of_state = _reached(trace.graph, state)
    kept = set(map(_storage, state))
    for node in trace.graph.nodes:
        written = {storage(t) for t in node.meta.get("mutates", ())}
        reads = node.all_input_nodes
        sets = name_of(node.target) in SETS
        if sets:
            reads = reads[1:]  # not what it writes over
        again = _any_of(reads, of_totals) and (not sets or _any_of(reads, of_state))
        if again and not kept.isdisjoint(written):
            raise _kept(node)
    returns: Sequence[Returned] = trace.gm.meta["returns"]
    for old, returned in zip(trace.outputs(), returns, strict=True):
        new = trace.new.get(old) if isinstance(old, fx.Node) else None
        if not returned.replaces or not isinstance(new, fx.Node):
            continue
        if _any_of([new], of_totals) and _any_of([new], of_state):
            raise _kept(new)


def _reached(graph: fx.Graph, sources: Iterable[fx.Node]) -> set[object]:
    """The memory of values that depend on some."""
    reached = set(map(_storage, sources))
    for node in graph.nodes:
        if _any_of(node.all_input_nodes, reached):
            results = tensors(node.meta.get("val"))
            reached.update(map(storage, (*results, *node.meta.get("mutates", ()))))
    return reached


def _any_of(nodes: Iterable[fx.Node], memory: Container[object]) -> bool:
    return any(storage(t) in memory for n in nodes for t in tensors(n.meta.get("val")))


def _storage(node: fx.Node) -> object:
    value = node.meta["val"]
    return storage(value) if isinstance(value, Tensor) else None


def _kept(node: fx.Node) -> PlanError:
    return PlanError(
        "the model adds what inputs alone decide, a total of the whole batch, to what "
        f"it keeps{line_of(node.meta.get('stack_trace'))}\n  each microbatch would add "
        "it again: compute it after the call, or write "
        'fxsched.backend(schedule, loss_reduction="mean")'
    )
