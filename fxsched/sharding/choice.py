"""Finds the weights to cut by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from ..rows.kinds import Kind, Rows
from .layouts import Follower, Operation, is_part, is_plain, value_of
from .region import Grower, Region, is_weight, where

OUTERS = (1, 2, 3)  # blocks along a dimension, as query, key and value in one weight


def choose_region(grower: Grower, nodes: Sequence[fx.Node]) -> Region:
    """All weights that can be cut such that nothing but sums has to be exchanged.

    A matrix is cut along a dimension that its product keeps, if all that comes of it
    ends in sums: as a projection by heads whose results the next one adds up.
    """
    chosen = Region({})
    for node in nodes:
        if node in chosen.layouts:
            continue
        for weight in node.all_input_nodes:
            if not is_weight(weight) or value_of(weight).dim() < 2:
                continue
            if weight in chosen.weights:
                continue
            region = _cut(grower, node, weight)
            if region is not None and is_apart(region, chosen):
                chosen.add(region)
                break
    return chosen


def _cut(grower: Grower, node: fx.Node, weight: fx.Node) -> Region | None:
    """The region of the first way to cut a weight that needs sums alone."""
    shards = grower.follower.shards
    ways = list(_ways(value_of(weight).shape, shards))
    none = f"it doesn't divide by {shards}"
    grower.reasons.setdefault(weight, f"{where(node)} has no rule" if ways else none)
    for rows in ways:
        layout = _layout(grower.follower, node, {weight: (rows,)})
        if is_plain(layout) and is_part(layout):
            grower.reasons[weight] = "nothing of what it makes is added up"
            region = grower.grow({weight: rows}, gathers=False)
            if region is not None and region.summed:
                return region
    return None


def _layout(
    follower: Follower, node: fx.Node, known: dict[fx.Node, tuple[Rows, ...]]
) -> tuple[Rows, ...]:
    return follower.layout(Operation.of(node), known)


def _ways(shape: Sequence[int], shards: int) -> Iterator[Rows]:
    for dim, size in enumerate(shape):
        for outer in OUTERS:
            if size % (outer * shards) == 0:
                yield Rows(Kind.APART, dim, outer)


def is_apart(region: Region, chosen: Region) -> bool:
    """Whether a region has nothing of those that are chosen."""
    return chosen.layouts.keys().isdisjoint(region.layouts) and (
        chosen.weights.keys().isdisjoint(region.weights)
    )
