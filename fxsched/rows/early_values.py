"""What a model computes of its inputs alone, for the whole batch, before a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..ir.graphs import ancestors
from ..ir.lazy import lazy_module


class Early(NamedTuple):
    """Computes values of what the traced graph is called with.

    read: the positions of the arguments that `graph` takes.
    """

    graph: fx.GraphModule
    read: tuple[int, ...]

    def __call__(self, *args: Any) -> Sequence[Tensor]:
        with torch.no_grad():
            values: Sequence[Tensor] = self.graph(*(args[i] for i in self.read))
            return values


def early_values(
    gm: fx.GraphModule, wanted: Sequence[fx.Node], inputs: Collection[int]
) -> Early | None:
    """A function of the graph's arguments that computes these nodes, or None if they
    depend on more than the arguments `inputs`, numbers and constants."""
    needed = ancestors(wanted)
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    index, read = 0, list[int]()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            tensor = isinstance(node.meta.get("example_value"), Tensor)
            if node in needed:
                if tensor and index not in inputs:
                    return None
                new[node] = graph.placeholder(node.name)
                read.append(index)
            index += 1
        elif node in needed:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in wanted))
    return Early(lazy_module(gm, graph), tuple(read))
