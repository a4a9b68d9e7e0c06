"""Rules for operations that are given graphs: FlexAttention and map.

    out, .. = flex_attention(q, k, v, score, (.., mask), scale, options, taken, taken)
    out, .. = map_impl(body, [x, ..], [w, ..])

A graph of FlexAttention is given the numbers of batch, head, query and key, and may
take what belongs to these from captured tensors: lengths[b].
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..ir.graphs import tensors
from .kinds import SHARED, Effect, Kind, OpCall, Rows

TAKES = (operator.getitem, torch.ops.aten.index.Tensor)
FILLS = ("new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like")


class _Read(NamedTuple):
    """What a call on parts reads: of some tensors parts, along a dimension each, and
    others as they are."""

    parts: list[tuple[Tensor, int]]
    whole: list[Any]


def flex_attention(call: OpCall) -> Rows:
    """Of query, key and value [batch, heads, length, width], whose rows are batches or
    heads."""
    read, dim = _read(call), _dim(call)
    numbered = read is None and dim < 2
    return _apart(call, read, dim, Effect.ORDER if numbered else Effect.PAIRS)


def parts(call: OpCall) -> list[tuple[Tensor, int]] | None:
    """The tensors of which a call on parts reads parts, and along which dimension; None
    if a graph makes something of a row's number."""
    read = _read(call)
    return None if read is None else read.parts


def _dim(call: OpCall) -> int:
    """The dimension that is cut."""
    rows = [call.of(each) for each in call.args[:3]]
    return next((each.dim for each in rows if each != SHARED), 0)


def mapped(call: OpCall) -> Rows:
    """Of slices along the first dimension, each by itself, and others as they are."""
    _, slices, others = call.args[:3]
    read = _Read([(each, 0) for each in tensors(slices)], others)
    return _apart(call, read, 0, Effect.MIX)


def _apart(call: OpCall, read: _Read | None, dim: int, effect: Effect) -> Rows:
    """Rows that are apart if what is read has them where it should."""
    right = read is not None and all(
        call.fits(value, rows)
        for value, rows in (
            *((tensor, Rows(Kind.APART, place)) for tensor, place in read.parts),
            *((value, SHARED) for value in read.whole),
        )
    )
    rows = Rows(Kind.APART, dim)
    return call.kept(rows, None if right else effect, *call.values)


def _read(call: OpCall) -> _Read | None:
    """What FlexAttention reads; None if a graph makes something of a row's number."""
    dim, (*tables, mask) = _dim(call), call.args[4]
    read = _Read([(each, dim) for each in (*call.args[:3], *tensors(tables))], [])
    score, given = call.args[3], (*call.args[7:9], (), ())
    for graph, place, captured in ((score, 1 + dim, given[0]), (mask, dim, given[1])):
        taken = _taken(graph, place, len(captured)) if dim < 2 else None
        if taken is None:
            return None
        for value, row in zip(captured, taken, strict=True):
            if row:
                read.parts.append((value, 0))
            elif row is not None:
                read.whole.append(value)
    whole = set(map(id, read.whole))
    return None if any(id(each) in whole for each, _ in read.parts) else read


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
