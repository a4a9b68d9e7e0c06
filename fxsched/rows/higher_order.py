"""Rules for operations that are given graphs: FlexAttention and map.

    out, .. = flex_attention(q, k, v, score, (.., mask), scale, options, taken, taken)
    out, .. = map_impl(body, [x, ..], [w, ..])

A graph of FlexAttention is given the numbers of batch, head, query and key, and may
take what belongs to these from captured tensors: lengths[b].
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.graphs import tensors
from .kinds import SHARED, Effect, Kind, OpCall, Rows, first_cause

TAKES = (operator.getitem, torch.ops.aten.index.Tensor)
FILLS = ("new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like")


def flex_attention(call: OpCall) -> Rows:
    """Of query, key and value [batch, heads, length, width], whose rows are batches or
    heads."""
    values = [call.of(each) for each in call.tensors()]
    read, dim, cause = parts(call), _dim(call), first_cause(values)
    if read is None:
        effect = Effect.PAIRS if dim > 1 else Effect.ORDER
        return Rows(Kind.APART, dim, cause=call.mixed(effect, *values))
    in_parts = {id(tensor) for tensor, _ in read}
    others = [each for each in call.tensors() if id(each) not in in_parts]
    if not (
        all(_is_beside(call, *each) for each in read)
        and all(call.of(each) == SHARED for each in others)
    ):
        cause = call.mixed(Effect.PAIRS, *values)
    return Rows(Kind.APART, dim, cause=cause)


def parts(call: OpCall) -> list[tuple[Tensor, int]] | None:
    """The tensors of which a call on parts reads parts, and along which dimension; None
    if a graph makes something of a row's number."""
    score, (*blocks, mask) = call.args[3:5]
    captured, dim = [*call.args[7:9], (), ()], _dim(call)
    if dim > 1:
        return None
    read = [(each, dim) for each in (*call.args[:3], *tensors(blocks))]
    for graph, place, given in ((score, 1, captured[0]), (mask, 0, captured[1])):
        taken = _taken(graph, place + dim, given)
        if taken is None:
            return None
        read += [(each, 0) for each in taken]
    return read


def _dim(call: OpCall) -> int:
    """The dimension that is cut."""
    rows = [call.of(each) for each in call.args[:3]]
    return next((each.dim for each in rows if each != SHARED), 0)


def mapped(call: OpCall) -> Rows:
    """Of slices along the first dimension, each by itself, and others as they are."""
    _, slices, others = call.args[:3]
    values = [call.of(each) for each in tensors((slices, others))]
    cause = first_cause(values)
    shared = all(call.of(each) == SHARED for each in tensors(others))
    if not shared or not all(_is_beside(call, each, 0) for each in tensors(slices)):
        cause = call.mixed(Effect.MIX, *values)
    return Rows(Kind.APART, 0, cause=cause)


def _is_beside(call: OpCall, value: Tensor, dim: int) -> bool:
    """Whether a tensor has the rows along a dimension, or is the same for all."""
    rows = call.of(value)
    if rows == SHARED:
        return call.whole or value.shape[dim] == 1
    return rows == Rows(Kind.APART, dim, cause=rows.cause)


def _taken(graph: Any, place: int, captured: Sequence[Any]) -> list[Tensor] | None:
    """The captured tensors that a graph takes a row's part of, by its number; None if
    it does something else with the number, or with these."""
    if not isinstance(graph, fx.GraphModule):
        return None
    given = graph.graph.find_nodes(op="placeholder")
    number, held = given[place], given[len(given) - len(captured) :]
    takes = {node for node in number.users if not _is_filled(node)}
    taken = {node.args[0] for node in takes}
    if not takes <= {u for n in taken for u in n.users} or not taken <= set(held):
        return None
    if not all(_takes_row(user, number) for node in taken for user in node.users):
        return None
    return [t for n, t in zip(held, captured, strict=True) if n in taken]


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
    return first is number and number not in rest and node.args[0] not in rest


RULES = {"flex_attention": flex_attention, "map_impl": mapped}
