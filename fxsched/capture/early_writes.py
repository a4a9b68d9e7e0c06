"""What a forward writes into its weights before it reads them happens before the step.

before: data = w.data; data.clamp_(0, 4.6); y = x * w.exp()
after:  y = x * w.exp()                           # and w.clamp_(0, 4.6) in each call

Each microbatch would do so with a copy of the weight; eager PyTorch does so once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ..ir.graphs import name_of
from ..ir.lazy import lazy_module
from .effects import writes_first
from .graph_inputs import placeholders

EARLY = "early"  # gm.meta: the writes into weights
DATA = "detach"


class EarlyWrite(NamedTuple):
    """A graph that writes into a weight, its only input; the weight's position."""

    input: int
    gm: fx.GraphModule

    def __call__(self, args: Sequence[Any]) -> None:
        """Writes into the weight among a call's inputs."""
        with torch.no_grad():
            self.gm(args[self.input])


def early_writes(gm: fx.GraphModule) -> tuple[EarlyWrite, ...]:
    """Those that were taken out of a graph."""
    found: tuple[EarlyWrite, ...] = gm.meta.get(EARLY, ())
    return found


def take_early_writes(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph, without what writes into weights before anything else reads them.

    What is written must come of that weight alone. Other writes stay, and are errors.
    """
    writes = []
    written = {_source(n) for n in gm.graph.nodes if writes_first(n)}
    for i, weight in enumerate(placeholders(gm)):
        example = weight.meta.get("example_value")
        trained = isinstance(example, Tensor) and example.requires_grad
        if weight in written and (trained or isinstance(example, nn.Parameter)):
            nodes = _writing(gm, weight)
            if nodes:
                writes.append(EarlyWrite(i, _alone(gm, weight, nodes)))
                for node in reversed(nodes):
                    if not node.users:
                        gm.graph.erase_node(node)
    gm.meta[EARLY] = tuple(writes)
    return gm


def _source(writer: fx.Node) -> Any:
    """What a node writes into, or what that is the data of."""
    target: Any = writer.args[0]
    while isinstance(target, fx.Node) and name_of(target.target) == DATA:
        target = target.args[0]
    return target


def _writing(gm: fx.GraphModule, weight: fx.Node) -> list[fx.Node]:
    """The nodes that write into a weight, and what these need; none if others read it
    before."""
    nodes = list(gm.graph.nodes)
    own, same, writes = {weight}, {weight}, list[fx.Node]()
    for node in nodes:
        reads = node.all_input_nodes
        if not node.op.startswith("call") or not reads or not own.issuperset(reads):
            continue
        own.add(node)
        if reads[0] in same and name_of(node.target) == DATA:
            same.add(node)
        if reads[0] in same and writes_first(node):
            writes.append(node)
    if not writes:
        return []
    needed = set(writes)
    for node in reversed(nodes):
        if node in own and not needed.isdisjoint(node.users):
            needed.add(node)
    until = nodes[: nodes.index(writes[-1])]
    early = [n for n in until if n not in needed and own & set(n.all_input_nodes)]
    late = [user for n in writes for user in n.users if user not in needed]
    return [] if early or late else [n for n in nodes if n in needed - {weight}]


def _alone(
    gm: fx.GraphModule, weight: fx.Node, nodes: Sequence[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    new = {weight: graph.placeholder("weight")}
    for node in nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
        new[node].meta = {}  # which has Dynamo's values
    graph.output(())
    return lazy_module(gm, graph, "EarlyWrite")
