"""Attention with dropout, written out so that its heads can be in parts.

On the CPU torch computes it by two products of matrices, with a dropout of the weights
between them: written out, that draws the numbers that it draws inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ..ir.facts import FACTS, facts
from ..ir.graphs import named_arguments, tensors
from ..ir.lazy import lazy_module
from ..ir.meta import of_node
from ..ir.regions import Regions
from ..ir.request import Device
from ..ir.shard_calls import attended, attention_weights
from ..partition.costs import Work, copied
from ..placement.layouts import Follower, Operation, in_flow, value_of

Nodes = dict[fx.Node, fx.Node]
aten = torch.ops.aten
FREE = Work(0, 0.0, 0.0, 0)


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


def open_attention(gm: fx.GraphModule, target: Device | None) -> Opened:
    """Writes attention with dropout out where torch computes it so: on the CPU.

    before: y = scaled_dot_product_attention(q, k, v, None, 0.1)
    after:  weights = attention_weights(q, k, None, 0.35)
            dropped = dropout(weights, 0.1, True)
            y = attended(dropped, v, float32)

    Heads of keys and values that several heads of queries share are repeated first.
    """
    follower = Follower(gm, 1)

    def write(graph: fx.Graph, node: fx.Node, new: Nodes) -> fx.Node | None:
        if not draws_on_cpu(node):
            return None
        return _Writer(follower, graph, node, target).write(new)

    return opened(gm, in_flow(gm.graph.nodes), write)


def draws_on_cpu(node: fx.Node) -> bool:
    """Whether a node is attention with dropout, computed as it is on the CPU."""
    return (
        node.target is aten.scaled_dot_product_attention.default
        and of_node(node).get("random") == 1
        and not of_node(node).get("joint")
        and all(t.device.type == "cpu" for t in tensors(value_of(node)))
    )


class _Writer:
    """Writes one call of attention out."""

    def __init__(
        self,
        follower: Follower,
        graph: fx.Graph,
        node: fx.Node,
        target: Device | None,
    ) -> None:
        self.follower, self.graph, self.node = follower, graph, node
        self.target = target

    def write(self, new: Nodes) -> fx.Node:
        """The node that gives the call's value, on values of the new graph."""
        node, (flops, forward, backward, held) = self.node, of_node(self.node)["work"]
        third = Work(flops // 2, forward / 3, backward / 3, held // 3)
        query, key, value, mask, p, causal, scale, shared = fx.map_arg(
            tuple(named_arguments(node).values()), new.__getitem__
        )
        if scale is None:
            scale = 1 / math.sqrt(int(value_of(query).shape[-1]))
        if shared:
            key, value = (self._repeated(query, each) for each in (key, value))
        if causal:
            mask = self._causal(query, key)
        weights = self._add(attention_weights, third, query, key, mask, scale)
        free = third._replace(flops=0)
        dropped = self._add(aten.dropout.default, free, weights, p, True)
        of_node(dropped)["random"] = of_node(node)["random"]
        out = self._add(attended, third, dropped, value, value_of(node).dtype)
        assert value_of(out).shape == value_of(node).shape, (
            f"{node} opened gives {value_of(out).shape}"
        )
        of_node(out)["key"] = of_node(node)["key"]
        return out

    def _repeated(self, query: fx.Node, read: fx.Node) -> fx.Node:
        """Keys or values, as many heads of them as of queries."""
        heads, groups = (int(value_of(each).shape[-3]) for each in (query, read))
        if heads == groups:
            return read
        return self._copy(aten.repeat_interleave.self_int, read, heads // groups, -3)

    def _causal(self, query: fx.Node, key: fx.Node) -> fx.Node:
        """Which keys each query sees that sees those before it."""
        sizes = [int(value_of(each).shape[-2]) for each in (query, key)]
        device = value_of(query).device
        every = self._copy(aten.ones.default, sizes, dtype=torch.bool, device=device)
        return self._copy(aten.tril.default, every)

    def _copy(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = self._add(target, FREE, *args, **kwargs)
        of_node(new)["work"] = copied(value_of(new), self.target)
        return new

    def _add(self, target: Any, work: Work, *args: Any, **kwargs: Any) -> fx.Node:
        """Another operation where the call is."""
        new = self.graph.call_function(target, args, kwargs)
        new.meta = {
            **self.node.meta,
            "val": self.follower.value(Operation.of(new)),
            "work": work,
            "random": 0,
            "mutates": (),
            "key": f"{of_node(self.node)['key']}:{new.name}",
        }
        return new
