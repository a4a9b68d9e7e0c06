"""Graphs in which some nodes are written otherwise, so that they can be in parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import fx

from ..ir.facts import FACTS, facts
from ..ir.lazy import lazy_module
from ..ir.regions import Regions

Nodes = dict[fx.Node, fx.Node]


class Opened(NamedTuple):
    """A graph some of whose nodes are written otherwise.

    origins: the nodes of the graph before that, by those that give the same now.
    """

    gm: fx.GraphModule
    origins: Mapping[fx.Node, fx.Node]


def opened(
    gm: fx.GraphModule,
    nodes: Sequence[fx.Node],
    write: Callable[[fx.Graph, fx.Node, Nodes], fx.Node | None],
) -> Opened:
    """The graph with what `write` makes of its nodes, in the regions that they are in.

    write: gives the node that is there for one, of those that are there for others; or
        None, if that is its copy.
    """
    graph, new, origins = fx.Graph(), Nodes(), Nodes()
    with Regions() as regions:
        for node in nodes:
            regions.pass_by(node)
            mine = write(graph, node, new)
            new[node] = mine or graph.node_copy(node, new.__getitem__)
            origins[new[node]] = node
    result = lazy_module(gm, graph, "Opened")
    result.meta[FACTS] = facts(gm)
    return Opened(result, origins)
