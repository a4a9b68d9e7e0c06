"""What an operation writes into, by its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..ir.graphs import is_mutable, name_of, named_arguments

NORMS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
STATISTICS = ("running_mean", "running_var")


def targets_of(node: fx.Node) -> dict[str, Any]:
    """What a node writes into, by the argument's name: nodes, and lists of them."""
    target: Any = node.target
    if not is_mutable(target) or torch.Tag.inplace_view in target.tags:
        return {}
    named = named_arguments(node)
    return {
        each.name: named[each.name]
        for each in target._schema.arguments
        if each.alias_info is not None and each.alias_info.is_write
        if named[each.name] is not None
    }


def statistics_of(node: fx.Node) -> list[fx.Node]:
    """The running mean and variance that a normalization in training moves, which its
    schema doesn't say."""
    if node.op != "call_function" or name_of(node.target) not in NORMS:
        return []
    named = named_arguments(node)
    moves = named[NORMS[name_of(node.target)]]
    return [named[name] for name in STATISTICS if moves and named[name] is not None]


def nodes_in(value: Any) -> Iterator[fx.Node]:
    """The nodes among an argument's values."""
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    yield from found
