"""A traced microbatch, run node by node for all microbatches, in one process.

Nothing of passes or the runtime is in it: it says what the plan's operations make, with
the plan's random numbers, so that values can be compared with those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..ir import joint
from ..ir.graphs import Role, numbered_draws, same_strides
from ..ir.meta import of_node
from ..ir.regions import Regions
from ..placement.kinds import Kind, Rows
from ..planning import TracedCall
from .draws import Numbers, PartDraws


class OnParts:
    """The values of each node: of each microbatch, or, of the whole batch, one.

    args: what the compiled function is called with, copies of it.
    seen: the values as they were when they were made; others may be written into.
    """

    def __init__(
        self, traced: TracedCall, args: Sequence[Any], numbers: Numbers
    ) -> None:
        self.traced, self.numbers = traced, numbers
        self.microbatches = traced.batch.microbatches
        early = () if traced.early is None else traced.early(*args)
        self.args = (*args, *early)
        self.values: dict[fx.Node, list[Any]] = {}
        self.seen: dict[fx.Node, Any] = {}
        self._drawn = numbered_draws(traced.graph.graph.nodes)
        self._interpreter = fx.Interpreter(traced.graph)

    def run(self) -> list[list[Any]]:
        """What microbatches give for each output."""
        with Regions() as regions:
            for node in self.traced.graph.graph.nodes:
                if node.op == "output":
                    return [self._of(each) for each in node.args[0]]
                if not regions.pass_by(node):
                    self.values[node] = self._values(node)
                    self.seen[node] = fx.node.map_aggregate(self.values[node], copied)
        raise AssertionError("a graph ends with its output")

    def _of(self, value: Any) -> list[Any]:
        return self.values[value] if isinstance(value, fx.Node) else [value]

    def _values(self, node: fx.Node) -> list[Any]:
        args: Any = node.args
        if node.op == "placeholder":
            value = self.args[of_node(node)["index"]]
            batch = of_node(node)["role"] is Role.BATCH
            return self._parts(value, of_node(node)["dim"]) if batch else [value]
        if node.op == "get_attr":
            return [self._interpreter.fetch_attr(str(node.target))]
        if node.target is joint.part:
            return self._parts(self.values[args[0]][0], args[1])
        if node.target is joint.join:
            return [joined(self.values[args[0]], args[1], args[2])]
        count = 1 if of_node(node).get("joint") else self.microbatches
        return [self._call(node, b) for b in range(count)]

    def _parts(self, whole: Tensor, dim: int) -> list[Tensor]:
        return [part.clone() for part in whole.chunk(self.microbatches, dim)]

    def _call(self, node: fx.Node, b: int) -> Any:
        def own(read: fx.Node) -> Any:
            values = self.values[read]
            return values[b if len(values) > 1 else 0]

        args, kwargs = fx.map_arg((node.args, node.kwargs), own)
        run: Callable[..., Any] = getattr(self._interpreter, node.op)
        drawn = self._drawn[node]
        if not drawn:
            return run(node.target, args, kwargs)
        rows: Rows | None = of_node(node).get("rows")
        outer = rows.outer if rows is not None and rows.kind is Kind.SHARD else 1
        with PartDraws(self.numbers, drawn, b, outer):
            return run(node.target, args, kwargs)


def joined(parts: Sequence[Tensor], how: str, dim: int) -> Tensor:
    """What microbatches' values are for the whole batch: "rows", a "sum" or "mean"."""
    if how == "rows":
        return torch.cat(list(parts), dim)
    total = sum(parts[1:], parts[0])
    return total if how == "sum" else total / len(parts)


def copied(value: Any) -> Any:
    """In memory of its own, without a history."""
    if not isinstance(value, Tensor):
        return value
    return same_strides(value).requires_grad_(value.requires_grad)
