"""Copies the nodes of one stage into a graph of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..ir.graphs import REGION_ENTERS, REGION_EXITS, Role, storage
from ..ir.lazy import lazy_module


class StageBuilder:
    """Copies the nodes of one stage into a graph of its own.

    nodes: the stage's and, among them, those that open and close regions.
    """

    def __init__(self, gm: fx.GraphModule, nodes: list[fx.Node]) -> None:
        self.nodes = [n for n in nodes if "stage" in n.meta]
        inside = set(self.nodes)
        read = dict.fromkeys(p for n in self.nodes for p in n.all_input_nodes)
        outer = [p for p in read if p not in inside and p.op != "get_attr"]
        self.state = [p for p in outer if _is_state(p)]
        self.inputs = [p for p in outer if not _is_state(p)]
        self.outputs = [
            n for n in self.nodes if any(_leaves(user, inside) for user in n.users)
        ]
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.module = self._build(gm, nodes)

    def _build(self, gm: fx.GraphModule, nodes: list[fx.Node]) -> fx.GraphModule:
        for node in [*self.state, *self.inputs]:
            self.new[node] = self.graph.placeholder(node.name)
            fake = node.meta["val"]  # another stage makes its outputs contiguous
            is_computed = node.op != "placeholder"
            self.new[node].meta["val"] = fake.contiguous() if is_computed else fake
        regions = _Regions(self.graph)
        for node in nodes:
            regions.pass_by(node)
            if "stage" in node.meta:
                regions.enter()
                self._copy(node)
        regions.leave()
        self.graph.output(tuple(self._result(node) for node in self.outputs))
        return lazy_module(gm, self.graph, "Stage")

    def _copy(self, node: fx.Node) -> None:
        for read in node.all_input_nodes:
            if read.op == "get_attr" and read not in self.new:
                self.new[read] = self.graph.node_copy(read)
        self.new[node] = self.graph.node_copy(node, self.new.__getitem__)
        keys = ("val", "recompute")
        self.new[node].meta = {k: node.meta[k] for k in keys if k in node.meta}

    def _result(self, node: fx.Node) -> fx.Node:
        """An output in memory of its own and contiguous, to be sent as it is."""
        fakes = [n.meta["val"] for n in [*self.state, *self.inputs]]
        before = self.outputs[: self.outputs.index(node)]
        fake = node.meta["val"]
        shared = {storage(t) for t in [*fakes, *(n.meta["val"] for n in before)]}
        if storage(fake) in shared or not fake.is_contiguous():
            kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format}
            return self.graph.call_method("clone", (self.new[node],), kwargs)
        return self.new[node]


class _Regions:
    """Opens in a stage's graph the autocast and no_grad regions that its nodes are in.

    A region is a pair of nodes in the program; a stage that holds only a part of what
    is between them gets a pair of its own.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.ambient = torch.is_grad_enabled()
        self.wanted: tuple[list[fx.Node], bool] = ([], self.ambient)
        self.opened: list[tuple[fx.Node, fx.Node]] = []  # in the program, in the stage
        self.grad = self.ambient

    def pass_by(self, node: fx.Node) -> None:
        """Follows the program's own regions."""
        autocasts, grad = self.wanted
        if node.target is torch._C._set_grad_enabled:
            self.wanted = (autocasts, bool(node.args[0]))
        elif node.target in REGION_ENTERS:
            self.wanted = ([*autocasts, node], grad)
        elif node.target in REGION_EXITS:
            self.wanted = ([n for n in autocasts if n is not node.args[0]], grad)

    def enter(self) -> None:
        """Makes the stage's regions those that the program is in."""
        autocasts, grad = self.wanted
        while [old for old, _ in self.opened] != autocasts[: len(self.opened)]:
            self._close()
        for old in autocasts[len(self.opened) :]:
            new = self.graph.create_node("call_function", old.target, old.args)
            self.opened.append((old, new))
        self._set_grad(grad)

    def leave(self) -> None:
        while self.opened:
            self._close()
        self._set_grad(self.ambient)

    def _close(self) -> None:
        _, new = self.opened.pop()
        self.graph.call_function(REGION_EXITS[0], (new,))

    def _set_grad(self, grad: bool) -> None:
        if grad != self.grad:
            self.graph.call_function(torch._C._set_grad_enabled, (grad,))
        self.grad = grad


def _is_state(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["role"] is not Role.BATCH


def _leaves(user: fx.Node, inside: set[fx.Node]) -> bool:
    return user.op == "output" or ("stage" in user.meta and user not in inside)
