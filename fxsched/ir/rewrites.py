"""Copies of graphs in which some nodes are others, and parts of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx

from .lazy import lazy_module

Write = Callable[[fx.Node], fx.Node]


def rewritten(gm: fx.GraphModule, write: Write) -> fx.GraphModule:
    """A copy of a graph.

    write: gives what takes the place of a node's copy, as a rule the copy.
    """
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        new[node] = write(graph.node_copy(node, new.__getitem__))
    result = lazy_module(gm, graph)
    result.meta.update(gm.meta)
    return result


def extracted(
    root: fx.GraphModule | None,
    inputs: Iterable[fx.Node],
    nodes: Iterable[fx.Node],
    results: Sequence[fx.Node],
    name: str = "Graph",
) -> fx.GraphModule:
    """Nodes as a graph of their own, of these inputs; nothing else is known of them."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        new[node] = graph.placeholder(node.name)
    for node in nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
        new[node].meta = {}
    graph.output([new[node] for node in results])
    return lazy_module(root, graph, name)


def added(like: fx.Node, target: Any, *args: Any, value: Any, **kwargs: Any) -> fx.Node:
    """A new node of a graph, where it is written; what is known of `like` is of it too.

    value: what it gives, as in Dynamo's graph.
    """
    new = like.graph.call_function(target, args, kwargs)
    new.meta.update(like.meta, example_value=value)
    return new
