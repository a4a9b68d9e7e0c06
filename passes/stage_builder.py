"""Copies the nodes of one stage into a graph of its own."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from ..autodiff.gradient_strides import restrided
from ..ir import joint
from ..ir.graphs import Role, arguments, storage
from ..ir.lazy import lazy_module
from ..ir.meta import of_node
from ..ir.regions import CopiedRegions


class Port(NamedTuple):
    """A value that a stage takes or gives; of a global-batch stage, in which
    microbatch, if it is of one."""

    node: fx.Node
    microbatch: int | None = None


class StageBuilder:
    """Copies the nodes of one stage into a graph of its own.

    nodes: the stage's and, among them, those that open and close regions. in_layout:
    whether values come in the memory layout that they have in the model.

    A global-batch stage takes what it reads of microbatches once for each, and joins
    them:

    before: whole_a = join(a, "rows", 0, 2); loss = pairs(whole_a)
    after:  whole_a = cat([a_0, a_1], 0); loss = pairs(whole_a)
    """

    def __init__(
        self, gm: fx.GraphModule, nodes: list[fx.Node], in_layout: bool = False
    ) -> None:
        self.nodes = [n for n in nodes if "stage" in of_node(n)]
        inside = set(self.nodes)
        read = dict.fromkeys(p for n in self.nodes for p in n.all_input_nodes)
        outer = [p for p in read if p not in inside and p.op != "get_attr"]
        self.state = [p for p in outer if _is_state(p)]
        self.joint = any(of_node(n).get("joint") for n in self.nodes)
        values = [p for p in outer if not _is_state(p)]
        joins = [n for n in self.nodes if n.target is joint.join]
        counts = {n.args[0]: _count(n) for n in joins}
        self.inputs = [port for p in values for port in _ports(p, counts.get(p))]
        self.outputs = [
            port
            for n in self.nodes
            if any(_leaves(user, inside) for user in n.users)
            for port in _ports(n, _count(n) if n.target is joint.part else None)
        ]
        stages = {of_node(n)["stage"] for n in self.nodes}
        passed = (
            p for p in values if not stages.isdisjoint(of_node(p).get("passed", ()))
        )
        self.outputs += map(Port, passed)
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.ports: dict[Port, fx.Node] = {}
        self.module = self._build(gm, nodes, in_layout)

    def _build(
        self, gm: fx.GraphModule, nodes: list[fx.Node], in_layout: bool
    ) -> fx.GraphModule:
        for port in [*map(Port, self.state), *self.inputs]:
            node, microbatch = port
            name = node.name if microbatch is None else f"{node.name}_of_{microbatch}"
            new = self.ports[port] = self.graph.placeholder(name)
            fake = of_node(node)["val"]  # another stage makes its outputs contiguous
            is_computed = node.op != "placeholder"
            of_node(new)["val"] = fake.contiguous() if is_computed else fake
            if microbatch is None:
                self.new[node] = new
        drawn = any(of_node(node).get("random") for node in self.nodes)
        if drawn or in_layout:
            for node, microbatch in self.inputs:
                if microbatch is None and node.op != "placeholder":
                    self.new[node] = self._ordered(self.new[node], of_node(node)["val"])
        regions = CopiedRegions(self.graph)
        for node in nodes:
            regions.pass_by(node)
            if "stage" in of_node(node):
                if node.target in (joint.join, joint.part):
                    regions.leave()  # gradients go through them everywhere
                else:
                    regions.enter()
                self._copy(node)
        regions.leave()
        self.graph.output(tuple(map(self._result, self.outputs)))
        return lazy_module(gm, self.graph, "Stage")

    def _ordered(self, came: fx.Node, fake: Any) -> fx.Node:
        """A value that came contiguous, its memory in the order that it has in the
        model: numbers are drawn in that order."""
        if fake.is_contiguous():
            return came
        return self._made(restrided, (came, fake.stride()), fake)

    def _copy(self, node: fx.Node) -> None:
        if node.target is joint.join:
            self.new[node] = self._join(node)
            return
        if node.target is joint.part:
            self.new[node] = self._parts(node)
            return
        for read in node.all_input_nodes:
            if read.op == "get_attr" and read not in self.new:
                self.new[read] = self.graph.node_copy(read)
        self.new[node] = self.graph.node_copy(node, self.new.__getitem__)
        keys = ("val", "recompute", "replicated", "module", "stack_trace")
        self.new[node].meta = {k: node.meta[k] for k in keys if k in node.meta}

    def _join(self, node: fx.Node) -> fx.Node:
        """What microbatches made, for the whole batch."""
        source, how, dim, count = arguments(node)
        parts = [self.ports[port] for port in _ports(source, count)]
        fake = of_node(node)["val"]
        if how == "rows":
            return self._made(torch.cat, (parts, dim), fake)
        total = parts[0]
        for each in parts[1:]:
            total = self._made(torch.add, (total, each), fake)
        return total if how == "sum" else self._made(torch.div, (total, count), fake)

    def _parts(self, node: fx.Node) -> fx.Node:
        """The rows of each microbatch."""
        source, dim, _ = arguments(node)
        size = of_node(node)["val"].shape[dim]
        return self._made(torch.split, (self.new[source], size, dim), None)

    def _made(self, target: Any, args: tuple[Any, ...], fake: Any) -> fx.Node:
        new = self.graph.call_function(target, args)
        of_node(new)["val"] = fake
        return new

    def _result(self, port: Port) -> fx.Node:
        """An output in memory of its own and contiguous, to be sent as it is."""
        node, microbatch = port
        value = self.new[node]
        if microbatch is not None:
            value = self.graph.call_function(operator.getitem, (value, microbatch))
        if microbatch is not None or self._shares(port):
            kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format}
            return self.graph.call_method("clone", (value,), kwargs)
        if not all(of_node(p.node)["val"].is_contiguous() for p in self.inputs):
            # those that came are: what is made of them may be in another order too
            return self.graph.call_method("contiguous", (value,))
        return value

    def _shares(self, port: Port) -> bool:
        """Whether an output's memory is not all its own, or in another order."""
        fakes = [
            of_node(n)["val"] for n in [*self.state, *(p.node for p in self.inputs)]
        ]
        before = self.outputs[: self.outputs.index(port)]
        fake = of_node(port.node)["val"]
        shared = {
            storage(t) for t in [*fakes, *(of_node(p.node)["val"] for p in before)]
        }
        return storage(fake) in shared or not fake.is_contiguous()


def reads_whole(node: fx.Node, by_joint: bool) -> bool:
    """Whether a stage, which may be joint itself, reads a value of the whole batch as
    it is, in all microbatches."""
    return (
        bool(of_node(node).get("joint"))
        and node.target is not joint.part
        and not by_joint
    )


def _ports(node: fx.Node, microbatches: int | None) -> list[Port]:
    if microbatches is None:
        return [Port(node)]
    return [Port(node, b) for b in range(microbatches)]


def _count(node: fx.Node) -> int:
    """How many microbatches a global-batch stage joins, or parts."""
    count: int = node.args[-1]  # type: ignore[assignment]
    return count


def _is_state(node: fx.Node) -> bool:
    return node.op == "placeholder" and of_node(node)["role"] is not Role.BATCH


def _leaves(user: fx.Node, inside: set[fx.Node]) -> bool:
    return user.op == "output" or ("stage" in of_node(user) and user not in inside)
