"""Finds the weights to cut by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from ..rows.kinds import Kind, Rows
from .layouts import Follower, Operation, is_part, is_plain, value_of
from .picked_experts import expert_seeds, is_selection, why_picked
from .region import Grower, Region, is_weight, where
from .stacks import is_stack

OUTERS = (1, 2, 3)  # blocks along a dimension, as query, key and value in one weight


def choose_region(grower: Grower, nodes: Sequence[fx.Node]) -> Region:
    """All weights that can be cut such that nothing but sums has to be exchanged.

    A matrix is cut along a dimension that its product keeps, if all that comes of it
    ends in sums: as a projection by heads whose results the next one adds up. Stacks of
    experts are cut first, by expert, which takes the fewest sums.
    """
    chosen = Region({})
    for node in filter(is_selection, nodes):
        region = picked_region(grower, node)
        if region is not None and is_apart(region, chosen):
            chosen.add(region)
    for stacks in (True, False):
        for node in nodes:
            if node in chosen.layouts:
                continue
            for weight in node.all_input_nodes:
                if not is_weight(weight) or value_of(weight).dim() < 2:
                    continue
                if weight in chosen.weights or (stacks and not is_stack(node, weight)):
                    continue
                region = _cut(grower, node, weight, stacks)
                if region is not None and is_apart(region, chosen):
                    chosen.add(region)
                    break
    return chosen


def picked_region(grower: Grower, node: fx.Node) -> Region | None:
    """The region of a selection's experts."""
    seeds = expert_seeds(node, grower.follower.shards)
    region = grower.grow(seeds, gathers=False) if seeds else None
    return region if region is not None and region.summed else None


def _cut(grower: Grower, node: fx.Node, weight: fx.Node, stacks: bool) -> Region | None:
    """The region of the first way to cut a weight that needs sums alone; of a stack, by
    its matrices."""
    shards = grower.follower.shards
    ways = list(_ways(value_of(weight).shape, shards))
    if stacks:
        ways = [rows for rows in ways if rows.place == (0, 1)]
    none = f"it doesn't divide by {shards}"
    rule = why_picked(node) if is_selection(node) else f"{where(node)} has no rule"
    grower.reasons.setdefault(weight, rule if ways else none)
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
