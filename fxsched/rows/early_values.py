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


def early_values(wanted: Sequence[fx.Node], inputs: Collection[int]) -> Early | None:
    """A function of their graph's arguments that computes these nodes, or None if they
    depend on more than the arguments `inputs`, numbers and constants."""
    needed, old = ancestors(wanted), wanted[0].graph
    places = enumerate(old.find_nodes(op="placeholder"))
    read = {node: i for i, node in places if node in needed}
    tensors = (n for n in read if isinstance(n.meta.get("example_value"), Tensor))
    if any(read[node] not in inputs for node in tensors):
        return None
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in old.nodes:
        if node in needed:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in wanted))
    return Early(lazy_module(old.owning_module, graph), tuple(read.values()))
