"""Finds the weights to cut by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from ..costmodel.costs import rates_of, send_seconds
from ..ir.graphs import tensors
from ..ir.request import Request
from ..rows.kinds import Rows
from .grower import Grower
from .layouts import (
    Operation,
    equal_parts,
    is_part,
    is_plain,
    is_stack,
    matrices,
    value_of,
    where,
)
from .own_rows import is_sum
from .picked_experts import expert_seeds, is_selection, why_picked
from .region import Region
from .vocabulary_rules import lookup_of


def choose_regions(
    grower: Grower, nodes: Sequence[fx.Node], request: Request
) -> list[Region]:
    """All weights that can be cut such that nothing but sums has to be exchanged, and
    vocabularies where that is faster; then, if some would be slower, those with them
    all, for less memory.

    A matrix is cut along a dimension that its product keeps, if all that comes of it
    ends in sums: as a projection by heads whose results the next one adds up. Stacks of
    experts are cut first, by expert, which takes the fewest sums; a vocabulary is cut
    into ranges of its rows.
    """
    chosen, ranges = Region({}), dict[fx.Node, Region]()
    for node in filter(is_selection, nodes):
        chosen.take(picked_region(grower, node))
    for stacks in (True, False):
        for node in nodes:
            if node in chosen.layouts:
                continue
            for weight in matrices(node):
                known = weight in chosen.weights
                if known or (stacks and not is_stack(node, weight)):
                    continue
                ways = _ways_to_cut(grower, weight, stacks, request)
                kept = weight.meta["index"] in request.cuts
                region = _cut(grower, node, weight, ways, ranges, kept)
                if chosen.take(region):
                    break
    return _with_ranges(grower, chosen, ranges, request)


def picked_region(grower: Grower, node: fx.Node) -> Region | None:
    """The region of a selection's experts."""
    seeds = expert_seeds(node, grower.follower.shards)
    region = grower.grow(seeds, gathers=False) if seeds else None
    return region if region is not None and region.summed else None


def _with_ranges(
    grower: Grower, chosen: Region, ranges: Mapping[fx.Node, Region], request: Request
) -> list[Region]:
    """What is chosen with the vocabularies that are faster in parts; then with all."""
    slow: list[Region] = []
    for weight, region in ranges.items():
        if not chosen.is_apart(region):
            continue
        kept = weight.meta["index"] in request.cuts
        if request.message_dtype is not None and region.joined and not kept:
            why = "message_dtype= would round what its loss is made of"
            grower.reasons[weight] = why
        elif kept or gain(region, chosen, grower.follower.shards) > 0:
            chosen.take(region)
        else:
            grower.reasons[weight] = "it would be slower in parts"
            slow.append(region)
    every = chosen.copy()
    for region in slow:
        every.take(region)
    return [chosen, every] if slow else [chosen]


def _ways_to_cut(
    grower: Grower, weight: fx.Node, stacks: bool, request: Request
) -> list[Rows]:
    """How a weight may be cut: of a stack, by its matrices."""
    kept = request.cuts.get(weight.meta["index"])
    return [
        rows
        for rows in equal_parts(value_of(weight).shape, grower.follower.shards)
        if (kept is None or (rows.dim, rows.outer) == kept.cut[:2])
        and (not stacks or rows.place == (0, 1))
    ]


def _cut(
    grower: Grower,
    node: fx.Node,
    weight: fx.Node,
    ways: Sequence[Rows],
    ranges: dict[fx.Node, Region],
    kept: bool,
) -> Region | None:
    """The region of the first way to cut a weight that needs sums alone; what cuts a
    vocabulary, or is gathered of weights that ranks keep in parts, is put into `ranges`
    instead."""
    shards = grower.follower.shards
    none = f"it doesn't divide by {shards}"
    rule = why_picked(node) if is_selection(node) else f"{where(node)} has no rule"
    grower.reasons.setdefault(weight, rule if ways else none)
    for rows in ways:
        layout = grower.follower.layout(Operation.of(node), {weight: (rows,)})
        table = lookup_of(node) is not None
        if not is_plain(layout) or not (is_part(layout) or table):
            continue
        grower.reasons[weight] = "nothing of what it makes is added up"
        region = grower.grow({weight: rows}, gathers=False)
        if region is None:
            continue
        ranged = any(call.ranged for call in region.calls.values())
        if ranged or (kept and not region.summed):
            ranges.setdefault(weight, region)
        elif region.summed:
            return region
    return None


def gain(region: Region, chosen: Region, shards: int) -> float:
    """Seconds that a microbatch's F and B get shorter by, if a region runs in parts and
    not on one shard; below 0 if they get longer.

    chosen: what runs in parts besides. A value that all shards are sent for it anyway
    costs a latency and no bytes more.
    """
    work = [node.meta["work"] for node in region.layouts]
    saved: float = sum(w.forward + w.backward for w in work) * (1 - 1 / shards)
    return saved - sum(
        _seconds(node, share * (shards - 1)) for node, share in _sent(region, chosen)
    )


def _sent(region: Region, chosen: Region) -> Iterator[tuple[fx.Node, float]]:
    """Values that go from shard to shard, and how much of each a shard sends to each
    other one."""
    entering = dict.fromkeys(
        read
        for node in region.layouts
        for read in node.all_input_nodes
        if "stage" in read.meta and read not in region.layouts
    )
    for node in entering:
        yield node, 1.0 - _is_sent(node, region, chosen)
    for node in region.gathered:
        if is_sum(region.layouts[node]) and region.calls[node].join is None:
            yield node, 1.0 - _is_sent(node, region, chosen)
        else:
            yield node, _bytes(region.calls[node].value) / _bytes(value_of(node))


def _is_sent(value: fx.Node, region: Region, chosen: Region) -> bool:
    """Whether all shards are sent a value, or what is made of it, for other regions."""
    seen, queue = set[fx.Node](), [value]
    while queue:
        for user in queue.pop().users:
            if user in chosen.layouts:
                return True
            if not (user in seen or user in region.layouts or matrices(user)):
                seen.add(user)
                queue.append(user)
    return False


def _seconds(node: fx.Node, share: float) -> float:
    """Seconds to send a share of a value forward and, if it has one, of its gradient
    back, and to add up what comes."""
    found = list(tensors(value_of(node)))
    device = found[0].device
    ways = 1 + any(t.requires_grad for t in found)
    size = int(share * _bytes(value_of(node)))
    added = size * 3 / rates_of(device).memory
    return ways * (send_seconds(size, device) + added)


def _bytes(value: Any) -> int:
    return max(sum(t.nbytes for t in tensors(value)), 1)
