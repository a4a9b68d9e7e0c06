"""Rules for operations that are given graphs: FlexAttention and map.

    out, .. = flex_attention(q, k, v, score, (.., mask), scale, options, taken, taken)
    out, .. = map_impl(body, [x, ..], [w, ..])

A graph of FlexAttention is given the numbers of batch, head, query and key, and may
take what belongs to these from captured tensors: lengths[b].
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..ir.graphs import tensors
from .kinds import SHARED, Effect, Kind, OpCall, Placed, Rows

TAKES = (operator.getitem, torch.ops.aten.index.Tensor)
FILLS = ("new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like")


def flex_attention(call: OpCall) -> Rows:
    """Of query, key and value [batch, heads, length, width], whose rows are batches or
    heads."""
    read, dim = reads(call), _dim(call)
    numbered = read is None and dim < 2
    return _apart(call, read, dim, Effect.ORDER if numbered else Effect.PAIRS)


def mapped(call: OpCall) -> Rows:
    """Of slices along the first dimension, each by itself, and others as they are."""
    _, slices, others = call.args[:3]
    parts = [(each, Rows(Kind.APART)) for each in tensors(slices)]
    return _apart(call, [*parts, *((each, SHARED) for each in others)], 0, Effect.MIX)


def _apart(call: OpCall, read: list[Placed] | None, dim: int, effect: Effect) -> Rows:
    """Rows that are apart if what is read has them where it should."""
    right = read is not None and call.fit(read)
    return call.kept(Rows(Kind.APART, dim), None if right else effect)


def _dim(call: OpCall) -> int:
    """The dimension of FlexAttention that is cut."""
    rows = [call.of(each) for each in call.args[:3]]
    return next((each.dim for each in rows if each != SHARED), 0)


def reads(call: OpCall) -> list[Placed] | None:
    """What FlexAttention on parts reads, each with its placement; None if a graph makes
    something of a row's number."""
    dim, (*tables, mask) = _dim(call), call.args[4]
    of_rows = (*call.args[:3], *tensors(tables))
    read: list[Placed] = [(each, Rows(Kind.APART, dim)) for each in of_rows]
    score, given = call.args[3], (*call.args[7:9], (), ())
    for graph, place, captured in ((score, 1 + dim, given[0]), (mask, dim, given[1])):
        taken = _taken(graph, place, len(captured)) if dim < 2 else None
        if taken is None:
            return None
        for value, row in zip(captured, taken, strict=True):
            if row is not None:
                read.append((value, Rows(Kind.APART) if row else SHARED))
    ways = {(id(value), rows.apart) for value, rows in read}
    return read if len(ways) == len({each for each, _ in ways}) else None


def _taken(graph: Any, place: int, count: int) -> list[bool | None] | None:
    """Of each of the last inputs of a graph, whether it takes what belongs to a row, by
    the number at a place; None if it reads nothing. None for all of them if it makes
    something else of the number."""
    if not isinstance(graph, fx.GraphModule):
        return None
    given = graph.graph.find_nodes(op="placeholder")
    number, held = given[place], given[len(given) - count :]
    takes = [node for node in number.users if not _is_filled(node)]
    if not all(_takes_row(node, number) for node in takes):
        return None
    taken = {node.args[0] for node in takes}
    if any(user not in takes for node in taken for user in node.users):
        return None
    known = taken <= set(held)
    return [n in taken if n.users else None for n in held] if known else None


def _is_filled(node: fx.Node) -> bool:
    """Whether a node takes no more than a type from what it reads."""
    name = str(getattr(node.target, "__name__", node.target)).split(".")[0]
    return name in FILLS and len(node.all_input_nodes) == 1


def _takes_row(node: fx.Node, number: fx.Node) -> bool:
    """Whether a node is tensor[number] or tensor[number, ..]."""
    if node.target not in TAKES:
        return False
    index = node.args[1]
    first, *rest = index if isinstance(index, (tuple, list)) else (index,)
    own = isinstance(node.args[0], fx.Node) and node.args[0] not in (number, *rest)
    return own and first is number and number not in rest
