"""Stacks of matrices, as of experts: [experts, .., ..]."""

from __future__ import annotations

from torch import fx

from .layouts import value_of

WORD = "expert"  # how a stack is cut whose parts are whole matrices


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
