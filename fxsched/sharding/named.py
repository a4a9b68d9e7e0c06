"""Finds the weights to cut by the names that the user gives."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import fx

from ..ir.user_line import line_of
from ..jobs.job import PlanError
from ..rows.kinds import Rows
from .choice import picked_region
from .grower import Grower
from .layouts import WORD, equal_parts, is_stack, matrices, value_of, where
from .picked_experts import is_selection, why_picked
from .region import Region


def named_region(
    grower: Grower, nodes: Sequence[fx.Node], words: Mapping[str, str]
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
    grower.wants = lambda weight: value_of(weight).dim() < 2 or weight in allowed
    experts = {weight for _, weight, word in named if word == WORD}
    for node in filter(is_selection, nodes):
        region = picked_region(grower, node)
        every = region.weights if region is not None else ()
        if all(value_of(w).dim() < 2 or w in experts for w in every):
            chosen.take(region)
    for gathers in (False, True):
        for node, weight, word in named:
            if weight in chosen.weights:
                if word != WORD:
                    _check_word(grower, node, weight, word, chosen)
                continue
            picked = word == WORD and is_selection(node)
            # as biases may go along
            if word == WORD and not (picked or is_stack(node, weight)):
                continue
            ways = _ways(grower, node, weight, word)
            grown = (grower.grow({weight: rows}, gathers) for rows in ways)
            region = next(filter(None, grown), None)
            if not chosen.take(region) and gathers:
                raise PlanError(_refusal(grower, node, weight, word))
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
            if fnmatchcase(str(node.meta["module"]), pattern)
        ]
        if not mine:
            known = sorted({str(node.meta["module"]) for node, _ in readers})
            near = difflib.get_close_matches(pattern, known, 3) or known[:3]
            raise PlanError(
                f"shards={{{pattern!r}: ..}} names no module with a weight of two "
                f"dimensions; did you mean {', '.join(near)}?"
            )
        fit = any(is_stack(*each[:2]) or is_selection(each[0]) for each in mine)
        if word == WORD and not fit:
            names = ", ".join(dict.fromkeys(each[1].meta["name"] for each in mine))
            raise PlanError(
                f"shards={{{pattern!r}: {word!r}}} names no weight of all experts, "
                f"[experts, .., ..], but {names}; name the module that has one, or "
                "give 'column' or 'row'"
            )
        found += mine
    place = {node: i for i, node in enumerate(nodes)}
    return sorted(found, key=lambda each: place[each[0]])


def _ways(grower: Grower, node: fx.Node, weight: fx.Node, word: str) -> list[Rows]:
    """How a weight can be cut that is named by a word."""
    shards, shape = grower.follower.shards, value_of(weight).shape
    words = {dim: grower.word(node, weight, dim) for dim in range(len(shape))}
    if word == WORD:  # be it that their products are added up
        words = {0: words[0] and WORD}
    dims = [dim for dim in words if words[dim] == word]
    ways = [rows for rows in equal_parts(shape, shards) if rows.dim in dims]
    return sorted(ways, key=lambda rows: rows.outer)


def _check_word(
    grower: Grower, node: fx.Node, weight: fx.Node, word: str, chosen: Region
) -> None:
    """Raises PlanError where a weight that two modules read is cut in another way."""
    other = grower.word(node, weight, chosen.weights[weight].dim)
    if other != word:
        raise PlanError(
            f"shards={{..: {word!r}}}: {weight.meta['name']} is cut by another name, "
            f"such that it is a {other or 'part'!r} to {where(node)}"
            f"{line_of(node.meta.get('stack_trace'))}\nname it once"
        )


def _refusal(grower: Grower, node: fx.Node, weight: fx.Node, word: str) -> str:
    """Why a weight that is named can't be cut."""
    shards, name = grower.follower.shards, weight.meta["name"]
    shape = list(map(int, value_of(weight).shape))
    stop = node
    if is_selection(node):
        why = why_picked(node)
    elif _ways(grower, node, weight, word):
        why = grower.reasons.get(weight, "its parts meet those of other weights")
        stop = grower.stops.get(weight, node)
    elif any(size % shards for size in shape):
        lengths = " x ".join(map(str, shape))
        fewer = word == WORD and shape[0] % shards
        why = (
            f"its {shape[0]} experts don't divide"
            if fewer
            else f"it is {lengths}, of which no {word} dimension divides"
        )
    else:
        why = f"{where(node)} has no rule for that"
    return (
        f"shards={{..: {word!r}}}: {name} can't be cut into {shards} parts: {why}"
        f"{line_of(stop.meta.get('stack_trace'))}\nleave it out, or give another "
        "number of shards"
    )
