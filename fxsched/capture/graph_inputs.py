"""The inputs of Dynamo's graph: sizes, and where they come from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.graphs import Spec
from ..ir.modes import casts
from .origins import Origin


def call_text(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """A call in the user's words: its tensors with their shapes, and its modes."""
    tensors = [
        f"{origin_of(node).name} {Spec.of(value)}"
        for node, value in zip(placeholders(gm), inputs, strict=True)
        if isinstance(value, Tensor) and origin_of(node).argument
    ]
    modes = ["with gradients" if torch.is_grad_enabled() else "without gradients"]
    modes += [f"{kind} autocast to {dtype}" for kind, dtype in casts()]
    return ", ".join(tensors + modes)


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    """The inputs of a graph, in order."""
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def symbol_of(size: object) -> Any:
    """The sympy symbol of a symbolic size, or None if it's a number or expression."""
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.expr
    return expression if expression.is_Symbol else None


def origin_of(node: fx.Node) -> Origin:
    """Where an input comes from, as dynamo.py or exported_graph.py wrote it down."""
    origin: Origin = node.meta["origin"]
    return origin


def text_of(gm: fx.GraphModule) -> str:
    """What tells a graph from others: its nodes, where inputs come from, where outputs
    go, and which tensors are constants of it."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    names = (str(node.target) for node in gm.graph.find_nodes(op="get_attr"))
    values = (getattr(gm, name, None) for name in names)
    constants = [str(id(value)) for value in values if isinstance(value, Tensor)]
    origins = [str(origin_of(node)) for node in placeholders(gm)]
    text = [*origins, *map(str, graphs), *constants, str(gm.meta["returns"])]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()
