"""Finds the weights to cut by itself."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from ..ir.graphs import tensors
from ..ir.meta import of_node
from ..ir.request import Request
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from ..partition.costs import rates_of, send_seconds
from .chosen_experts import expert_seeds, is_selection, why_picked
from .kinds import Rows
from .layouts import (
    WORD,
    Operation,
    equal_parts,
    is_part,
    is_plain,
    is_stack,
    lookup_of,
    matrices,
    value_of,
    where,
)
from .own_rows import is_sum
from .propagation import Propagation
from .region import Region


def choose_regions(
    propagation: Propagation, nodes: Sequence[fx.Node], request: Request
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
        chosen.take(picked_region(propagation, node))
    for stacks in (True, False):
        for node in nodes:
            if node in chosen.layouts:
                continue
            for weight in matrices(node):
                known = weight in chosen.weights
                if known or (stacks and not is_stack(node, weight)):
                    continue
                ways = _ways_to_cut(propagation, weight, stacks, request)
                kept = of_node(weight)["index"] in request.cuts
                region = _cut(propagation, node, weight, ways, ranges, kept)
                if chosen.take(region):
                    break
    return _with_ranges(propagation, chosen, ranges, request)


def picked_region(propagation: Propagation, node: fx.Node) -> Region | None:
    """The region of a selection's experts."""
    seeds = expert_seeds(node, propagation.follower.shards)
    region = propagation.grow(seeds, gathers=False) if seeds else None
    return region if region is not None and region.summed else None


def _with_ranges(
    propagation: Propagation,
    chosen: Region,
    ranges: Mapping[fx.Node, Region],
    request: Request,
) -> list[Region]:
    """What is chosen with the vocabularies that are faster in parts; then with all."""
    slow: list[Region] = []
    for weight, region in ranges.items():
        if not chosen.is_apart(region):
            continue
        kept = of_node(weight)["index"] in request.cuts
        if request.encode.activations is not None and region.joined and not kept:
            why = "encode= would round what its loss is made of"
            propagation.reasons[weight] = why
        elif kept or gain(region, chosen, propagation.follower.shards, request) > 0:
            chosen.take(region)
        else:
            propagation.reasons[weight] = "cutting it makes the step slower"
            slow.append(region)
    every = chosen.copy()
    for region in slow:
        every.take(region)
    return [chosen, every] if slow else [chosen]


def _ways_to_cut(
    propagation: Propagation, weight: fx.Node, stacks: bool, request: Request
) -> list[Rows]:
    """How a weight may be cut: of a stack, by its matrices."""
    kept = request.cuts.get(of_node(weight)["index"])
    return [
        rows
        for rows in equal_parts(value_of(weight).shape, propagation.follower.shards)
        if (kept is None or (rows.dim, rows.outer) == kept.cut[:2])
        and (not stacks or rows.place == (0, 1))
    ]


def _cut(
    propagation: Propagation,
    node: fx.Node,
    weight: fx.Node,
    ways: Sequence[Rows],
    ranges: dict[fx.Node, Region],
    kept: bool,
) -> Region | None:
    """The region of the first way to cut a weight that needs sums alone; what cuts a
    vocabulary, or is gathered of weights that ranks keep in parts, is put into `ranges`
    instead."""
    shards = propagation.follower.shards
    none = f"it doesn't divide by {shards}"
    rule = why_picked(node) if is_selection(node) else f"{where(node)} has no rule"
    propagation.reasons.setdefault(weight, rule if ways else none)
    for rows in ways:
        layout = propagation.follower.layout(Operation.of(node), {weight: (rows,)})
        table = lookup_of(node) is not None
        if not is_plain(layout) or not (is_part(layout) or table):
            continue
        propagation.reasons[weight] = "nothing adds up its results"
        region = propagation.grow({weight: rows}, gathers=False)
        if region is None:
            continue
        ranged = any(call.ranged for call in region.calls.values())
        if ranged or (kept and not region.summed):
            ranges.setdefault(weight, region)
        elif region.summed:
            return region
    return None


def gain(region: Region, chosen: Region, shards: int, request: Request) -> float:
    """Seconds that a microbatch's F and B get shorter by, if a region runs in parts and
    not on one shard; below 0 if they get longer.

    chosen: what runs in parts besides. A value that all shards are sent for it anyway
    costs a latency and no bytes more.
    """
    work = [of_node(node)["work"] for node in region.layouts]
    saved: float = sum(w.forward + w.backward for w in work) * (1 - 1 / shards)
    return saved - sum(
        _seconds(node, share * (shards - 1), request)
        for node, share in _sent(region, chosen)
    )


def _sent(region: Region, chosen: Region) -> Iterator[tuple[fx.Node, float]]:
    """Values that go from shard to shard, and how much of each a shard sends to each
    other one."""
    entering = dict.fromkeys(
        read
        for node in region.layouts
        for read in node.all_input_nodes
        if "stage" in of_node(read) and read not in region.layouts
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


def _seconds(node: fx.Node, share: float, request: Request) -> float:
    """Seconds to send a share of a value forward and, if it has one, of its gradient
    back, and to add up what comes."""
    found = list(tensors(value_of(node)))
    device = found[0].device
    ways = 1 + any(t.requires_grad for t in found)
    size = int(share * _bytes(value_of(node)))
    added = size * 3 / rates_of(device, request.device).memory
    sent = send_seconds(size, device, request.shard_link, request.device)
    return ways * (sent + added)


def _bytes(value: Any) -> int:
    return max(sum(t.nbytes for t in tensors(value)), 1)


def named_region(
    propagation: Propagation, nodes: Sequence[fx.Node], words: Mapping[str, str]
) -> Region:
    """The region of weights that are named.

    words: "column", "row" or "expert" by patterns of names of modules. A "column"
        weight is cut along the dimension that its product has, a "row" weight along the
        one that its product sums over, an "expert" weight into whole matrices.
        What of other weights goes along with them, such as biases, is cut too; matrices
        that aren't named stay whole, and what they read of parts is gathered.
    Raises PlanError for a name that no module with a weight has, a weight that doesn't
    divide, and operations on parts that have no rule.
    """
    chosen, named = Region({}), _named(nodes, words)
    allowed = {weight for _, weight, _ in named}
    propagation.wants = lambda weight: value_of(weight).dim() < 2 or weight in allowed
    experts = {weight for _, weight, word in named if word == WORD}
    for node in filter(is_selection, nodes):
        region = picked_region(propagation, node)
        every = region.weights if region is not None else ()
        if all(value_of(w).dim() < 2 or w in experts for w in every):
            chosen.take(region)
    for gathers in (False, True):
        for node, weight, word in named:
            if weight in chosen.weights:
                if word != WORD:
                    _check_word(propagation, node, weight, word, chosen)
                continue
            picked = word == WORD and is_selection(node)
            # as biases may go along
            if word == WORD and not (picked or is_stack(node, weight)):
                continue
            ways = _ways(propagation, node, weight, word)
            grown = (propagation.grow({weight: rows}, gathers) for rows in ways)
            region = next(filter(None, grown), None)
            if not chosen.take(region) and gathers:
                raise PlanError(_refusal(propagation, node, weight, word))
    return chosen


def _named(
    nodes: Sequence[fx.Node], words: Mapping[str, str]
) -> list[tuple[fx.Node, fx.Node, str]]:
    """The nodes of named modules that read a matrix, with it and its word."""
    readers = [(node, weight) for node in nodes for weight in matrices(node)]
    found: list[tuple[fx.Node, fx.Node, str]] = []
    for pattern, word in words.items():
        mine = [
            (node, weight, word)
            for node, weight in readers
            if fnmatchcase(str(of_node(node)["module"]), pattern)
        ]
        if not mine:
            known = sorted({str(of_node(node)["module"]) for node, _ in readers})
            near = difflib.get_close_matches(pattern, known, 3) or known[:3]
            raise PlanError(
                f"shards={{{pattern!r}: ..}} names no module with a weight of two "
                f"dimensions; name one that has, such as {', '.join(near)}"
            )
        fit = any(is_stack(*each[:2]) or is_selection(each[0]) for each in mine)
        if word == WORD and not fit:
            names = ", ".join(dict.fromkeys(of_node(each[1])["name"] for each in mine))
            raise PlanError(
                f"shards={{{pattern!r}: {word!r}}} names no weight of all experts, "
                f"[experts, .., ..], but {names}; name the module that has one, or "
                "give 'column' or 'row'"
            )
        found += mine
    place = {node: i for i, node in enumerate(nodes)}
    return sorted(found, key=lambda each: place[each[0]])


def _ways(
    propagation: Propagation, node: fx.Node, weight: fx.Node, word: str
) -> list[Rows]:
    """How a weight can be cut that is named by a word."""
    shards, shape = propagation.follower.shards, value_of(weight).shape
    words = {dim: propagation.word(node, weight, dim) for dim in range(len(shape))}
    if word == WORD:  # be it that their products are added up
        words = {0: words[0] and WORD}
    dims = [dim for dim in words if words[dim] == word]
    ways = [rows for rows in equal_parts(shape, shards) if rows.dim in dims]
    return sorted(ways, key=lambda rows: rows.outer)


def _check_word(
    propagation: Propagation, node: fx.Node, weight: fx.Node, word: str, chosen: Region
) -> None:
    """Raises PlanError where a weight that two modules read is cut in another way."""
    other = propagation.word(node, weight, chosen.weights[weight].dim)
    if other != word:
        raise PlanError(
            f"shards={{..: {word!r}}}: {of_node(weight)['name']} is also cut by "
            f"another name in shards=, as {other or 'part'!r} for "
            f"{where(node)}{line_of(node.meta.get('stack_trace'))}\nname this weight "
            "once"
        )


def _refusal(
    propagation: Propagation, node: fx.Node, weight: fx.Node, word: str
) -> str:
    """Why a weight that is named can't be cut."""
    shards, name = propagation.follower.shards, of_node(weight)["name"]
    shape = list(map(int, value_of(weight).shape))
    stop = node
    if is_selection(node):
        why = why_picked(node)
    elif _ways(propagation, node, weight, word):
        why = propagation.reasons.get(weight, "its parts meet those of other weights")
        stop = propagation.stops.get(weight, node)
    elif any(size % shards for size in shape):
        lengths = " x ".join(map(str, shape))
        fewer = word == WORD and shape[0] % shards
        why = (
            f"its {shape[0]} experts don't divide"
            if fewer
            else f"its shape is {lengths}, and no {word} dimension divides"
        )
    else:
        why = f"{where(node)} has no rule for that"
    return (
        f"shards={{..: {word!r}}}: {name} can't be cut into {shards} parts: {why}"
        f"{line_of(stop.meta.get('stack_trace'))}\nleave it out, or give another "
        "number of shards"
    )
