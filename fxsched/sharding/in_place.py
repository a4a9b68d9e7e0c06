"""Arithmetic in place, as `x += y`, out of it, so that what it writes into can be in
parts, or a sum of them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ..ir.graphs import storage, tensors
from ..ir.regions import Regions
from ..ir.writes import touching
from .layouts import Follower, Operation, value_of
from .nodes import in_flow, writes_operand
from .opened import Nodes, Opened, opened


def open_writes(gm: fx.GraphModule) -> Opened:
    """Does arithmetic out of place where nothing else shares the memory.

    before: y = linear(h, w)
            y_1 = add_(y, x)
            z = relu_(y_1)
    after:  y = linear(h, w)
            y_1 = add(y, x)
            z = relu(y_1)
    """
    nodes, follower = in_flow(gm.graph.nodes), Follower(gm, 1)
    alike = _alike(follower, nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    kept = set[int]().union(*map(_places, inputs))
    lone = {
        place
        for place, group in touching(nodes).items()
        if place not in kept and _is_alone(place, group, alike)
    }

    def write(graph: fx.Graph, node: fx.Node, new: Nodes) -> fx.Node | None:
        places = _places(node) & lone
        if places.isdisjoint(p for n in node.all_input_nodes for p in _places(n)):
            return None
        call = alike.get(node, Operation.of(node)).on(new)
        mine = graph.create_node(*call[:4], node.name)
        mine.meta = {**node.meta, "val": follower.value(call)}
        if node in alike:
            mine.meta["mutates"] = ()
            # what others have of this memory is the new value
            new.update({n: mine for n in new if not places.isdisjoint(_places(n))})
        return mine

    return opened(gm, nodes, write)


def _alike(follower: Follower, nodes: Sequence[fx.Node]) -> dict[fx.Node, Operation]:
    """What gives the same out of place, of all arithmetic in place."""
    alike = {}
    with Regions() as regions:
        for node in nodes:
            regions.pass_by(node)
            twin = _twin(node) if node.meta.get("mutates") else None
            if twin and _is_like(follower.value(twin), value_of(node)):
                alike[node] = twin
    return alike


def _is_alone(place: int, group: Sequence[fx.Node], alike: Container[fx.Node]) -> bool:
    """Whether all that writes into memory has a twin, and nothing has views of it
    before."""
    maker, *others = group
    made = {maker}
    for node in others:
        if place in _places(node) or writes_operand(node):
            if node not in alike or node.args[0] not in made:
                return False
            made.add(node)
    reads = set[int]().union(*map(_places, maker.all_input_nodes))
    return place not in reads and isinstance(value_of(maker), Tensor)


def _twin(node: fx.Node) -> Operation | None:
    """A call's arithmetic out of place; None if there is none, or it draws numbers."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    name = target.overloadpacket.__name__
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    twin = getattr(packet, target._overloadname, target)
    if twin in (target, torch.ops.aten.copy.default):  # which has no gradient
        return None
    if node.meta.get("random") or len(node.meta["mutates"]) != 1:
        return None
    return Operation.of(node)._replace(target=twin)


def _is_like(value: Any, other: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return False
    mine, its = (
        (t.shape, t.dtype, t.stride(), t.requires_grad) for t in (value, other)
    )
    return mine == its


def _places(node: fx.Node) -> set[int]:
    return set(map(storage, tensors(node.meta.get("val"))))
