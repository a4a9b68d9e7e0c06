"""Rules for operations that are given graphs: FlexAttention and map.

    out, .. = flex_attention(q, k, v, score, (.., mask), scale, options, taken, taken)
    out, .. = map_impl(body, [x, ..], [w, ..])

A graph of FlexAttention is given the numbers of batch, head, query and key, and may
take what belongs to these from captured tensors: lengths[b].
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..ir.graphs import tensors
from .kinds import SHARED, Effect, Kind, OpCall, Rows, first_cause

TAKES = (operator.getitem, torch.ops.aten.index.Tensor)
FILLS = ("new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like")


class _Captured(NamedTuple):
    """What graphs read beside numbers. taken: tensors of which they take what belongs
    to a row, by its number; whole: what they read in another way."""

    taken: list[Tensor]
    whole: list[Any]


def flex_attention(call: OpCall) -> Rows:
    """Of query, key and value [batch, heads, length, width], whose rows are batches or
    heads."""
    values = [call.of(each) for each in call.tensors()]
    read, captured, dim = parts(call), _captured(call), _dim(call)
    if read is None or captured is None:
        effect = Effect.PAIRS if dim > 1 else Effect.ORDER
        return Rows(Kind.APART, dim, cause=call.mixed(effect, *values))
    cause = first_cause(values)
    shared = all(_is_shared(call, each) for each in captured.whole)
    if not shared or not all(_is_beside(call, *each) for each in read):
        cause = call.mixed(Effect.PAIRS, *values)
    return Rows(Kind.APART, dim, cause=cause)


def parts(call: OpCall) -> list[tuple[Tensor, int]] | None:
    """The tensors of which a call on parts reads parts, and along which dimension; None
    if a graph makes something of a row's number."""
    captured, dim = _captured(call), _dim(call)
    if captured is None or dim > 1:
        return None
    beside = [*call.args[:3], *tensors(call.args[4][:-1])]
    read = [(each, dim) for each in beside] + [(each, 0) for each in captured.taken]
    whole = set(map(id, captured.whole))
    return None if any(id(each) in whole for each, _ in read) else read


def _captured(call: OpCall) -> _Captured | None:
    """That of both graphs; None if one makes something of a row's number."""
    dim, given = _dim(call), [*call.args[7:9], (), ()]
    score = _reads(call.args[3], 1 + dim, given[0])
    mask = _reads(call.args[4][-1], dim, given[1])
    if score is None or mask is None:
        return None
    return _Captured(score.taken + mask.taken, score.whole + mask.whole)


def _dim(call: OpCall) -> int:
    """The dimension that is cut."""
    rows = [call.of(each) for each in call.args[:3]]
    return next((each.dim for each in rows if each != SHARED), 0)


def mapped(call: OpCall) -> Rows:
    """Of slices along the first dimension, each by itself, and others as they are."""
    _, slices, others = call.args[:3]
    values = [call.of(each) for each in tensors((slices, others))]
    cause = first_cause(values)
    shared = all(_is_shared(call, each) for each in others)
    if not shared or not all(_is_beside(call, each, 0) for each in tensors(slices)):
        cause = call.mixed(Effect.MIX, *values)
    return Rows(Kind.APART, 0, cause=cause)


def _is_beside(call: OpCall, value: Tensor, dim: int) -> bool:
    """Whether a tensor has the rows along a dimension, or is the same for all."""
    rows = call.of(value)
    if rows == SHARED:
        return call.whole or value.shape[dim] == 1
    return rows == Rows(Kind.APART, dim, cause=rows.cause)


def _is_shared(call: OpCall, value: object) -> bool:
    """Whether a value is the same for all rows; numbers may be of the batch's size."""
    return call.of(value) == SHARED if isinstance(value, Tensor) else call.whole


def _reads(graph: Any, place: int, captured: Sequence[Any]) -> _Captured | None:
    """What a graph reads; None if it makes something of the number at a place."""
    if not isinstance(graph, fx.GraphModule):
        return None
    given = graph.graph.find_nodes(op="placeholder")
    number, held = given[place], given[len(given) - len(captured) :]
    takes = [node for node in number.users if not _is_filled(node)]
    if not all(_takes_row(node, number) for node in takes):
        return None
    taken = {node.args[0] for node in takes}
    if any(user not in takes for node in taken for user in node.users):
        return None
    found = _Captured([], [])
    for node, value in zip(held, captured, strict=True):
        if node in taken:
            found.taken.append(value)
        elif node.users:
            found.whole.append(value)
    return found if len(found.taken) == len(taken) else None


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
