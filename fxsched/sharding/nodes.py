"""What is asked of a model's nodes: what they read, write, draw, and where they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from ..ir import joint
from ..ir.graphs import REGION_ENTERS, REGION_EXITS, Role, name_of, storage, tensors
from .layouts import value_of

# What opens and closes regions such as autocast's, or leads into the whole batch.
AROUND = (*REGION_ENTERS, *REGION_EXITS, joint.join)
DROPOUT = torch.ops.aten.dropout.default
WORD = "expert"  # how a stack of matrices is cut whose parts are whole matrices


def where(node: fx.Node) -> str:
    """An operation, and the module that it is in."""
    return f"{name_of(node.target)} in {node.meta['module'] or 'the model'}"


def in_flow(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes in their order, but for those that come after what reads them, as totals
    of the whole batch may: these come just before it."""
    ordered: dict[fx.Node, None] = {}
    for last in nodes:
        waiting = [last]
        while waiting:
            node = waiting[-1]
            missing = [n for n in node.all_input_nodes if n not in ordered]
            waiting += missing
            if not missing:
                ordered.setdefault(waiting.pop())
    return list(ordered)


def is_weight(node: fx.Node) -> bool:
    """Whether a node is a parameter of the model."""
    return node.meta.get("role") is Role.PARAMETER


def matrices(node: fx.Node) -> list[fx.Node]:
    """The parameters of two dimensions or more that a node reads."""
    reads = filter(is_weight, node.all_input_nodes)
    return [weight for weight in reads if value_of(weight).dim() > 1]


def is_stack(node: fx.Node, weight: fx.Node) -> bool:
    """Whether a weight that a node reads is several matrices: of three dimensions, and
    not a convolution's."""
    return value_of(weight).dim() > 2 and "conv" not in str(node.target)


def why_whole(weight: fx.Node, shards: int, reason: str) -> str:
    """Why a weight stays whole, if one that was tried stays so for a reason."""
    experts = int(value_of(weight).shape[0])
    stacked = any(is_stack(node, weight) for node in weight.users)
    if stacked and experts > 1 and experts % shards:
        return f"its {experts} experts don't divide by {shards}"
    return reason


def draws_itself(node: fx.Node) -> bool:
    """Whether a node draws random numbers, unless it is a dropout whose parts can be
    of the same ones."""
    fake = value_of(node)
    dropout = (
        node.target is DROPOUT and isinstance(fake, Tensor) and fake.is_contiguous()
    )
    return bool(node.meta.get("random")) and not dropout


def writes_operand(node: fx.Node) -> bool:
    """Whether a node writes into what it reads, and not into memory of its own."""
    written = {storage(t) for t in node.meta.get("mutates", ())}
    return any(
        storage(t) in written
        for read in node.all_input_nodes
        for t in tensors(read.meta.get("val"))
    )
