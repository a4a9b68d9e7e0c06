"""Arithmetic in place, as `x += y`, out of it, so that what it writes into can be in
parts, or a sum of them."""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.facts import FACTS, facts
from ..ir.graphs import storage, tensors
from ..ir.lazy import lazy_module
from ..ir.regions import Regions
from ..ir.writes import touching
from .attention import Opened
from .layouts import Follower, Operation, value_of
from .nodes import in_flow, writes_operand

OPERATORS = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def open_writes(gm: fx.GraphModule) -> Opened:
    """Does arithmetic out of place where nothing else shares the memory.

    before: y = linear(h, w)
            y += x
            z = relu(y, inplace=True)
    after:  y = linear(h, w)
            y_1 = y + x
            z = relu(y_1)
    """
    nodes, follower = in_flow(gm.graph.nodes), Follower(gm, 1)
    alike = _alike(follower, nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    kept = set[int]().union(*map(_places, inputs))
    twins: dict[fx.Node, Operation] = {}
    for place, group in touching(nodes).items():
        if place not in kept and _is_alone(place, group, alike):
            twins |= {node: alike[node] for node in group if node in alike}
    if not twins:
        return Opened(gm, {node: node for node in nodes})
    places = {storage(value_of(node)) for node in twins}
    graph, origins = fx.Graph(), dict[fx.Node, fx.Node]()
    new: dict[fx.Node, fx.Node] = {}
    with Regions() as regions:
        for node in nodes:
            regions.pass_by(node)
            call = twins.get(node)
            if call is None:
                new[node] = graph.node_copy(node, new.__getitem__)
            else:
                mine = call.on(new)
                new[node] = graph.create_node(*mine[:4], node.name)
                new[node].meta = {**node.meta, "mutates": ()}
            origins[new[node]] = node
            views = _places(node) & places
            if views & set[int]().union(*map(_places, node.all_input_nodes)):
                _renew(follower, new[node])
            if call is not None:  # what others have of this memory is the new value
                for other in [n for n in new if not views.isdisjoint(_places(n))]:
                    new[other] = new[node]
    opened = lazy_module(gm, graph, "OutOfPlace")
    opened.meta[FACTS] = facts(gm)
    return Opened(opened, origins)


def _alike(follower: Follower, nodes: Sequence[fx.Node]) -> dict[fx.Node, Operation]:
    """What gives the same out of place, of all arithmetic in place."""
    alike = {}
    with Regions() as regions:
        for node in nodes:
            regions.pass_by(node)
            twin = _twin(node) if node.meta.get("mutates") else None
            if twin is None:
                continue
            args, kwargs = fx.map_arg((twin.args, twin.kwargs), value_of)
            if _is_like(follower.run(twin, args, kwargs), value_of(node)):
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
    call = Operation.of(node)
    name = str(getattr(node.target, "__name__", node.target))
    if node.meta.get("random") or len(node.meta["mutates"]) != 1:
        return None
    if node.kwargs.get("inplace") is True:
        return call._replace(kwargs={**node.kwargs, "inplace": False})
    if node.target in OPERATORS:
        return call._replace(target=OPERATORS[node.target])
    plain = name[:-1] if name.endswith("_") and not name.endswith("__") else ""
    if node.op == "call_method" and hasattr(Tensor, plain):
        return call._replace(target=plain)
    if getattr(torch, name, None) is node.target and hasattr(torch, plain):
        return call._replace(target=getattr(torch, plain))
    return None


def _is_like(value: Any, other: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return False
    mine, its = (
        (t.shape, t.dtype, t.stride(), t.requires_grad) for t in (value, other)
    )
    return mine == its


def _renew(follower: Follower, node: fx.Node) -> None:
    """Gives a node a value of its own, or a view of what it reads now."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    node.meta["val"] = follower.run(Operation.of(node), args, kwargs)


def _places(node: fx.Node) -> set[int]:
    return set(map(storage, tensors(node.meta.get("val"))))
