"""Rows that belong to one shard each, as values say: those of tokens which a router
sends to experts.

Every shard has all rows of such a value, in the same places, of which those of its own
experts are right. What is done to each row by itself leaves it so; else the others are
made zeros first, and what comes of it is a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..ir import joint
from ..ir.graphs import name_of, named_arguments, tensors
from ..ir.shard_calls import grouped_part, of_groups, of_picked, picked_part
from .chosen_experts import Lone, lone_layout
from .kinds import REPLICATE, UNKNOWN, Kind, Rows
from .layouts import (
    Each,
    Follower,
    Layout,
    Layouts,
    Operation,
    laid_out,
    value_of,
)

GROUPED = ("_grouped_mm", "grouped_mm_fallback")


class Owner(NamedTuple):
    """Which expert each row belongs to.

    numbers: a number for each row; or, `grouped`, where each expert's rows end.
    experts: how many there are.
    """

    numbers: fx.Node
    grouped: bool
    experts: int


class Start(NamedTuple):
    """A call by which rows come to belong to experts: weights that values pick."""

    weights: fx.Node
    owner: Owner
    x: fx.Node | None = None  # of a grouped product


class RowFollower(Follower):
    """Follows parts, and rows that belong to one shard each."""

    def layout(self, call: Operation, known: Layouts) -> Layout:
        if call.target is joint.part:  # some rows of a sum are that of these rows
            return tuple(
                rows if rows == Rows(Kind.SUM) else UNKNOWN
                for layout in known.values()
                for rows in layout
            )
        own = None
        if not call.is_item:
            own = lone_layout(call, known, self.shards) or own_layout(self, call, known)
        return own or super().layout(call, known)


def start_of(call: Operation, known: Layouts, shards: int) -> Start | None:
    """What a call picks or groups by, if its weights are cut by expert, or can be."""
    start = _grouped(call) or _picked(call)
    if start is None or start.owner.experts % shards or start.owner.numbers in known:
        return None
    rows, before = known.get(start.weights), known.get(start.x) if start.x else None
    if rows is None and before is None:
        return None
    if rows is not None and rows != (Rows(Kind.SHARD, 0),):
        return None
    if before not in (None, (Rows(Kind.OWN, 0, owner=start.owner),)):
        return None
    return start


def own_layout(follower: Follower, call: Operation, known: Layouts) -> Layout | None:
    """What becomes of rows that belong to one shard each; None if none do."""
    start = start_of(call, known, follower.shards)
    if start is not None:
        return (Rows(Kind.OWN, 0, owner=start.owner),)
    own = [(tensor, rows) for tensor, rows in laid_out(known) if rows != REPLICATE]
    if all(rows.kind is not Kind.OWN for _, rows in own):
        return None
    lengths = {int(tensor.shape[rows.dim]) for tensor, rows in own if tensor.dim()}
    count = len(list(tensors(call.value)))
    if len({rows.owner for _, rows in own}) > 1 or len(lengths) > 1:
        return (UNKNOWN,) * count
    (length,), owner = lengths, own[0][1].owner
    alone = {
        read: tuple(
            Rows(Kind.SHARD, rows.dim) if rows.kind is Kind.OWN else rows
            for rows in layout
        )
        for read, layout in known.items()
    }
    found = follower.followed(call, alone, length)
    return tuple(
        _owned(rows, tensor, length, owner)
        for rows, tensor in zip(found, tensors(call.value), strict=True)
    )


def own_call(
    follower: Follower, call: Operation, start: Start
) -> tuple[Any, tuple[Any, ...]]:
    """What a shard calls in the place of one that picks weights, and its arguments."""
    weights, owner, x = start
    first = Each(tuple(range(0, owner.experts, owner.experts // follower.shards)))
    if owner.grouped:
        return grouped_part, (call.target, x, weights, owner.numbers, first)
    return picked_part, (weights, owner.numbers, first, owner.experts)


def zeroing(rows: Rows, value: Any, numbers: Any, p: int, shards: int) -> Any:
    """What a shard calls to make rows of others zeros, with its arguments."""
    owner: Any = rows.owner
    count = owner.experts // shards
    args = (value, numbers, rows.dim, p * count, count, owner.experts)
    return (of_groups if owner.grouped else of_picked), args


def as_sums(known: Layouts) -> tuple[dict[fx.Node, Layout], set[fx.Node]]:
    """Layouts in which rows of others are zeros, and the nodes that have some."""
    own = {n for n in known if any(map(_is_zeroed, known[n]))}
    sums = {
        n: tuple(Rows(Kind.SUM) if _is_zeroed(rows) else rows for rows in known[n])
        for n in known
    }
    return sums, own


def numbers_of(layout: Layout) -> set[fx.Node]:
    """The nodes that say whose rows are whose."""
    owners = (rows.owner for rows in layout)
    return {owner.numbers for owner in owners if isinstance(owner, Owner)}


def is_lone(layout: Layout) -> bool:
    """Whether a value belongs to one shard."""
    return any(isinstance(rows.owner, Lone) for rows in layout)


def is_sum(layout: Layout) -> bool:
    """Whether what all shards have of a value adds up to it, or can."""
    return any(rows.kind is Kind.SUM or _is_zeroed(rows) for rows in layout)


def picked_beside(layout: Layout, makers: Iterator[Any]) -> Iterator[fx.Node]:
    """Of the nodes that make what is read beside rows, with the weights which they
    read: the weights that they pick for these rows."""
    owners = {rows.owner for rows in layout if rows.kind is Kind.OWN}
    for maker, weight in makers:
        start = _picked(Operation.of(maker))
        if start is not None and start.owner in owners and start.weights is weight:
            yield weight


def _is_zeroed(rows: Rows) -> bool:
    return rows.kind is Kind.OWN and not isinstance(rows.owner, Lone)


def _owned(rows: Rows, tensor: Tensor, length: int, owner: object) -> Rows:
    apart = rows.kind is Kind.SHARD and rows.outer == 1 and not rows.numbers
    if rows == REPLICATE:
        return rows
    if apart and rows.cause is None and int(tensor.shape[rows.dim]) == length:
        return Rows(Kind.OWN, rows.dim, owner=owner)
    return UNKNOWN


def _grouped(call: Operation) -> Start | None:
    """Of a grouped product of rows [rows, k] and weights [experts, k, n]."""
    given = list(named_arguments(call).values())
    if name_of(call.target) not in GROUPED or len(given) < 3:
        return None
    x, weights, ends, *rest = given
    if any(each is not None for each in rest) or not isinstance(ends, fx.Node):
        return None
    if (value_of(x).dim(), value_of(weights).dim()) != (2, 3):
        return None
    return Start(weights, Owner(ends, True, int(value_of(weights).shape[0])), x)


def _picked(call: Operation) -> Start | None:
    """Of weights[numbers]."""
    if call.target is not torch.ops.aten.index.Tensor or len(call.args[1]) != 1:
        return None
    weights, (numbers,) = call.args
    index = value_of(numbers)
    if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        return None
    return Start(weights, Owner(numbers, False, int(value_of(weights).shape[0])))
