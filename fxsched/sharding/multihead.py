"""torch.nn.MultiheadAttention, written out so that its heads can be in parts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ..costmodel.costs import Meter, Work
from ..ir.facts import FACTS, facts
from ..ir.lazy import lazy_module
from ..ir.regions import Regions
from .attention import Opened
from .layouts import Follower, Operation, value_of
from .nodes import in_flow


def open_multihead(gm: fx.GraphModule) -> Opened:
    """Writes multi_head_attention_forward, which is one node to Dynamo, out.

    before: y = multi_head_attention_forward(x, x, x, 32, 4, w, b, .., v, c)[0]
    after:  qkv = linear(x, w, b)
            ..
            a = scaled_dot_product_attention(q, k, v)
            y = linear(a, v, c)
    """
    nodes = in_flow(gm.graph.nodes)
    if not any(map(_is_whole, nodes)):
        return Opened(gm, {node: node for node in nodes})
    graph, writer = fx.Graph(), _Writer(gm)
    new: dict[fx.Node, fx.Node] = {}
    results: dict[Any, Sequence[Any]] = {}  # of those that are written out
    with Regions() as regions:
        for node in nodes:
            regions.pass_by(node)
            if _is_whole(node):
                results[node] = writer.write(graph, node, new)
            elif node.target is operator.getitem and node.args[0] in results:
                new[node] = results[node.args[0]][cast(int, node.args[1])]
            else:
                new[node] = graph.node_copy(node, new.__getitem__)
    for node in reversed(writer.made):  # such as weights that nothing reads
        if not node.users:
            graph.erase_node(node)
    opened = lazy_module(gm, graph, "Opened")
    opened.meta[FACTS] = facts(gm)
    return Opened(opened, {mine: node for node, mine in new.items()})


def _is_whole(node: fx.Node) -> bool:
    return (
        node.target is F.multi_head_attention_forward
        and not node.meta.get("joint")
        and all(user.target is operator.getitem for user in node.users)
    )


class _Step(NamedTuple):
    """An operation inside, what it gives and takes, and how often it draws."""

    node: fx.Node
    value: Any
    flops: int
    seconds: float
    random: int


class _Writer:
    """Writes nodes out, as torch's own function calls others.

    made: the nodes that were made.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.made: list[fx.Node] = []
        self.follower, self.mode = Follower(gm, 1), facts(gm).fake_mode

    def write(
        self, graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node]
    ) -> Sequence[Any]:
        """The nodes of what a node gives."""
        inner = self._inside(node)
        reads = [new[read] for read in node.all_input_nodes]
        placeholders = inner.find_nodes(op="placeholder")
        mine: dict[fx.Node, Any] = dict(zip(placeholders, reads, strict=True))
        steps: list[_Step] = []
        for each in inner.nodes:
            if each.op == "call_function":
                mine[each] = graph.node_copy(each, mine.__getitem__)
                steps.append(self._run(mine[each]))
        self.made += [step.node for step in steps]
        whole, seconds = node.meta["work"], sum(step.seconds for step in steps)
        for step in steps:
            part = step.seconds / seconds
            step.node.meta = {
                **node.meta,
                "val": step.value,
                "work": Work(
                    step.flops,
                    part * whole.forward,
                    part * whole.backward,
                    int(part * whole.held),
                ),
                "random": step.random,
                "mutates": (),
                "key": f"{node.meta['key']}:{step.node.name}",
            }
        outputs: Any = inner.output_node().args[0]
        results: Sequence[Any] = fx.map_arg(outputs, mine.__getitem__)
        return results

    def _inside(self, node: fx.Node) -> fx.Graph:
        """The operations that a node's function calls, of what the node reads."""
        reads, target = node.all_input_nodes, node.target
        assert callable(target)

        def call(*values: Any) -> Any:
            given = dict(zip(reads, values, strict=True))
            args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
            return target(*args, **kwargs)

        with self.mode:
            gm: fx.GraphModule = make_fx(call, pre_dispatch=True)(*map(value_of, reads))
        gm.graph.eliminate_dead_code()
        return gm.graph

    def _run(self, node: fx.Node) -> _Step:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        with Meter() as meter:
            value = self.follower.run(Operation.of(node), args, kwargs)
        node.meta = {"val": value}
        flops, _, seconds = meter.total
        return _Step(node, value, flops, seconds + 1e-9, meter.random)
