"""Regions of autocast and without gradients, while the nodes in them run."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import fx

from .graphs import REGION_ENTERS, REGION_EXITS


def is_region(node: fx.Node) -> bool:
    """Whether a node opens or closes a region."""
    return node.target in REGION_ENTERS or node.target in REGION_EXITS


def inside_regions(graph: fx.Graph) -> set[fx.Node]:
    """The nodes in regions, in which they must run."""
    autocast, set_gradients = REGION_ENTERS
    opened, gradients, inside = 0, True, set()
    for node in graph.nodes:
        if node.target is set_gradients:
            gradients = bool(node.args[0])
        opened += (node.target is autocast) - (node.target in REGION_EXITS)
        if opened or not gradients:
            inside.add(node)
    return inside


class Regions:
    """Follows a graph's own regions, which are pairs of nodes; all that are open end
    with it, and gradients are on at its start."""

    def __init__(self) -> None:
        self._entered: dict[fx.Node, Any] = {}
        self._grad = torch.enable_grad()

    def __enter__(self) -> Regions:
        self._grad.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in reversed(list(self._entered)):
            self._leave(node)
        self._grad.__exit__(kind, error, trace)

    def pass_by(self, node: fx.Node) -> bool:
        """Opens or closes the region that a node does; returns whether it is one."""
        target: Any = node.target
        if target is torch._C._set_grad_enabled:
            target(bool(node.args[0]))
        elif target in REGION_ENTERS:
            self._entered[node] = target(*node.args)
        elif target in REGION_EXITS:
            self._leave(node.args[0])
        else:
            return False
        return True

    def _leave(self, node: Any) -> None:
        torch.amp.autocast_mode._exit_autocast(self._entered.pop(node))  # type: ignore[no-untyped-call]


class CopiedRegions:
    """Opens in the graph of a part the autocast and no_grad regions of its nodes.

    A region is a pair of nodes in the whole graph; a part that holds only some of what
    is between them gets a pair of its own.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.ambient = torch.is_grad_enabled()
        self.wanted: tuple[list[fx.Node], bool] = ([], self.ambient)
        self.opened: list[tuple[fx.Node, fx.Node]] = []  # in the whole, in the part
        self.grad = self.ambient

    def pass_by(self, node: fx.Node) -> None:
        """Follows the whole graph's regions."""
        autocasts, grad = self.wanted
        if node.target is torch._C._set_grad_enabled:
            self.wanted = (autocasts, bool(node.args[0]))
        elif node.target in REGION_ENTERS:
            self.wanted = ([*autocasts, node], grad)
        elif node.target in REGION_EXITS:
            self.wanted = ([n for n in autocasts if n is not node.args[0]], grad)

    def enter(self) -> None:
        """Makes the part's regions those that the whole is in."""
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
