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
