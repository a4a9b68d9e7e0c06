"""Which inputs a gradient for an output reaches: eager leaves None in all others."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from .microbatch import Microbatch


def output_leaves(trace: Microbatch) -> dict[fx.Node, frozenset[int]]:
    """For each output, the inputs of the call that its gradient reaches, by autograd's
    records of the trace."""
    inputs = trace.graph.find_nodes(op="placeholder")
    index = {id(node.meta["val"]): node.meta["index"] for node in inputs}
    return {
        old: frozenset(
            index[each] for each in _leaves(trace.values[old]) & index.keys()
        )
        for old in trace.outputs()
        if isinstance(old, fx.Node) and isinstance(trace.values.get(old), Tensor)
    }


def _leaves(value: Tensor) -> set[int]:
    """The tensors without a history that a value comes of, by their ids."""
    if value.grad_fn is None:
        return {id(value)} if value.requires_grad else set()
    leaves, seen, queue = set[int](), {value.grad_fn}, [value.grad_fn]
    while queue:
        function: Any = queue.pop()
        if hasattr(function, "variable"):
            leaves.add(id(function.variable))
        new = {each for each, _ in function.next_functions if each} - seen
        seen |= new
        queue += new
    return leaves
