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
    (score, (*blocks, mask)), captured = call.args[3:5], [*call.args[7:9], (), ()]
    values = [call.of(each) for each in call.tensors()]
    apart = [rows for rows in map(call.of, call.args[:3]) if rows != SHARED]
    dim = apart[0].dim if apart else 0
    cause = first_cause(values)
    if not apart or dim > 1 or not _beside(call, call.args[:3], dim):
        cause = call.mixed(Effect.PAIRS, *values)
    elif not (
        _follows(call, score, 1 + dim, captured[0])
        and _follows(call, mask, dim, captured[1])
        and _beside(call, [*tensors(blocks)], dim)
    ):
        cause = call.mixed(Effect.ORDER, *values)
    return Rows(Kind.APART, dim, cause=cause)


def mapped(call: OpCall) -> Rows:
    """Of slices along the first dimension, each by itself, and others as they are."""
    _, slices, others = call.args[:3]
    values = [call.of(each) for each in tensors((slices, others))]
    cause = first_cause(values)
    shared = all(call.of(each) == SHARED for each in tensors(others))
    if not shared or not _beside(call, [*tensors(slices)], 0):
        cause = call.mixed(Effect.MIX, *values)
    return Rows(Kind.APART, 0, cause=cause)


def _beside(call: OpCall, values: Sequence[Tensor], dim: int) -> bool:
    """Whether each has the rows along a dimension, or is the same for all of them."""
    for each in values:
        rows = call.of(each)
        same = rows == SHARED and (each.shape[dim] == 1 or call.whole)
        if not same and rows != Rows(Kind.APART, dim, cause=rows.cause):
            return False
    return True


def _follows(call: OpCall, graph: Any, place: int, captured: Sequence[Any]) -> bool:
    """Whether a graph takes a row for what it is, whatever its number: it reads the
    number to take the row's part of captured tensors, and these in no other way."""
    if not isinstance(graph, fx.GraphModule):
        return False
    given = graph.graph.find_nodes(op="placeholder")
    rows = [call.of(each) if isinstance(each, Tensor) else SHARED for each in captured]
    held = given[len(given) - len(rows) :] if rows else []
    parts = {n for n, each in zip(held, rows, strict=True) if each != SHARED}
    known = (Rows(Kind.APART, 0, cause=each.cause) for each in rows)
    if any(r not in (SHARED, a) for r, a in zip(rows, known, strict=True)):
        return False
    number = given[place]
    for node in graph.graph.nodes:
        reads = {number, *parts}.intersection(node.all_input_nodes)
        if reads and not (_is_filled(node) or _takes_row(node, number, parts)):
            return False
    return True


def _is_filled(node: fx.Node) -> bool:
    """Whether a node takes no more than a type from what it reads."""
    name = str(getattr(node.target, "__name__", node.target)).split(".")[0]
    return name in FILLS and len(node.all_input_nodes) == 1


def _takes_row(node: fx.Node, number: fx.Node, parts: set[fx.Node]) -> bool:
    """Whether a node is part[number] or part[number, ..]."""
    if node.target not in TAKES:
        return False
    source, index = node.args[:2]
    first, *rest = index if isinstance(index, (tuple, list)) else (index,)
    others = {each for each in rest if isinstance(each, fx.Node)}
    return source in parts and first is number and others.isdisjoint({number, *parts})


RULES = {"flex_attention": flex_attention, "map_impl": mapped}
