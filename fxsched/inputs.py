"""The inputs of Dynamo's graph: sizes, and where they come from."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .origins import Origin


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def symbol_of(size: object) -> Any:
    """The sympy symbol of a symbolic size, or None if it's a number or expression."""
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.expr
    return expression if expression.is_Symbol else None


def origin_of(node: fx.Node) -> Origin:
    """Where an input comes from, as trace.note_origins wrote it down."""
    origin: Origin = node.meta["origin"]
    return origin
