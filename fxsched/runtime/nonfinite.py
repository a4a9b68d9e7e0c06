"""Finds the operation of a job that made a NaN or Inf, by running the job again."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_map

from ..ir.finite import nonfinite
from ..ir.graphs import result


def first_nonfinite(stage: fx.GraphModule, given: tuple[Any, ...]) -> fx.Node | None:
    """The node of a stage's flat graphs from which a NaN or Inf in its results comes:
    what it read had none. None if running the stage again makes none.

    given: what the job was called with, and stays as it is.
    """
    again = _Again(stage)
    again.run(*tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, given))
    for graph, flat in again.flats:
        bad = [node for node in _nodes(result(graph)) if _kind(flat, node)]
        for node in sorted(bad, key=lambda node: _kind(flat, node) == "Inf"):
            return _source(flat, node)
    return None


class _Again(fx.Interpreter):
    """Runs a stage, and keeps all values of its flat graphs."""

    def __init__(self, stage: fx.GraphModule) -> None:
        super().__init__(stage)
        self.flats: list[tuple[fx.GraphModule, fx.Interpreter]] = []

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        if not isinstance(module, fx.GraphModule):
            return super().call_module(target, args, kwargs)
        flat = fx.Interpreter(module, garbage_collect_values=False)
        self.flats.append((module, flat))
        return flat.run(*args)


def _source(flat: fx.Interpreter, node: fx.Node) -> fx.Node:
    """The node that made what a value has: back along what has the same."""
    kind = _kind(flat, node)
    for read in node.all_input_nodes:
        if read.op != "placeholder" and _kind(flat, read) == kind:
            return _source(flat, read)
    return node


def _kind(flat: fx.Interpreter, node: fx.Node) -> str | None:
    value = flat.env.get(node)
    values = value if isinstance(value, (tuple, list)) else (value,)
    kinds = {nonfinite(each) for each in values}
    return "NaN" if "NaN" in kinds else "Inf" if "Inf" in kinds else None


def _nodes(values: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(values, found.append)
    return found
