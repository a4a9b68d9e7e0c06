"""What a step computes of its inputs before its first job."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .graphs import ancestors
from .rewrites import extracted


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
    needed, graph = ancestors(wanted), wanted[0].graph
    nodes = [node for node in graph.nodes if node in needed]
    places = {n: i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
    reads = [node for node in nodes if node in places]
    for node in reads:
        tensor = isinstance(node.meta.get("example_value"), Tensor)
        if tensor and places[node] not in inputs:
            return None
    calls = [node for node in nodes if node not in places]
    early = extracted(graph.owning_module, reads, calls, wanted)
    return Early(early, tuple(places[node] for node in reads))
