"""Operators of users, and those that are given graphs: FlexAttention and map.

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
from torch import fx

from ..ir.graphs import named_arguments, tensors
from .compute_rules import beside
from .kinds import REPLICATE, UNKNOWN, Cause, Effect, Kind, OpCall, Placed, Rows


class Strategy(NamedTuple):
    """The placements of an operator's inputs, and of its outputs then."""

    inputs: tuple[Rows, ...]
    outputs: tuple[Rows, ...]


class Declared(NamedTuple):
    """What is said of an operator. forward: None where it keeps rows apart, wherever
    they are; backward: None where it follows from forward."""

    forward: tuple[Strategy, ...] | None = None
    backward: tuple[Strategy, ...] | None = None


TAKES = (operator.getitem, torch.ops.aten.index.Tensor)
FILLS = ("new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like")
DECLARED: dict[Any, Declared] = {}  # by overload


class _Call(NamedTuple):
    """The tensors that a call reads and gives, each with a placement."""

    reads: list[Placed]
    gives: list[Placed]

    @property
    def every(self) -> list[Placed]:
        """Both."""
        return [*self.reads, *self.gives]

    @property
    def has_dims(self) -> bool:
        """Whether tensors have the dimensions along which they are said to be parts."""
        return all(not r.sharded or 0 <= r.dim < t.dim() for t, r in self.every)


def kept(call: OpCall) -> Rows | Sequence[Rows]:
    """The rule of what is declared."""
    values = call.values
    if DECLARED[call.target].forward is None:
        apart = any(rows.sharded for rows in values) and not call.whole
        return beside(call, *values) if apart else UNKNOWN
    found = _fitting(call)
    if found is None or (call.whole and backward_meets(call)):
        return call.other(Effect.MIX)
    return [rows for _, rows in found.gives]


def reads(call: OpCall) -> list[Placed] | None:
    """What a call on parts reads, each with its placement; None if that isn't known."""
    found = _fitting(call)
    return found.reads if found else None


def backward_meets(call: OpCall) -> Cause | None:
    """Where parts meet in the backward of a call, if they do and F has them apart."""
    found, backward = _fitting(call), DECLARED[call.target].backward
    if found is None or backward is None:
        return None
    for strategy in backward:
        gradients = _placed(call, strategy.outputs, strategy.inputs).every
        pairs = zip(found.every, gradients, strict=True)
        if all(
            gradient == rows.of_gradient
            for (tensor, rows), (_, gradient) in pairs
            if tensor.is_floating_point() or tensor.is_complex()
        ):
            return None
    return Cause(Effect.BACKWARD, str(call.target), call.stack)


def lacks_dims(node: fx.Node) -> bool:
    """Whether all that is said of a node's operator is of tensors that have more
    dimensions than the node's."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), _example)
    call = OpCall(
        node.target, args, kwargs, _example(node), lambda _: REPLICATE, 1, None
    )
    forward = DECLARED[node.target].forward or ()
    return bool(forward) and not any(_placed(call, *each).has_dims for each in forward)


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _fitting(call: OpCall) -> _Call | None:
    """The first of what is said that the rows of a call's arguments fit."""
    for strategy in DECLARED[call.target].forward or ():
        found = _placed(call, *strategy)
        if found.has_dims and call.fit(found.reads):
            return found
    return None


def _placed(call: OpCall, inputs: Sequence[Rows], outputs: Sequence[Rows]) -> _Call:
    schema, given = call.target._schema, [*named_arguments(call).values()]
    gives = call.out if len(schema.returns) > 1 else [call.out]
    reads = _pairs(schema.arguments, given, inputs)
    return _Call(reads, _pairs(schema.returns, gives, outputs))


def _pairs(
    fields: Sequence[Any], values: Sequence[Any], placed: Sequence[Rows]
) -> list[Placed]:
    """Tensors with their placements, whose dimensions are counted from the first."""
    pairs = zip(fields, values, strict=True)
    of_tensors = [value for field, value in pairs if "Tensor" in str(field.type)]
    return [
        (tensor, rows._replace(dim=rows.dim + (rows.dim < 0) * tensor.dim()))
        for value, rows in zip(of_tensors, placed, strict=True)
        for tensor in tensors(value)
    ]


def flex_attention(call: OpCall) -> Rows:
    """Of query, key and value [batch, heads, length, width], whose rows are batches or
    heads."""
    read, dim = flex_reads(call), _dim(call)
    numbered = read is None and dim < 2
    return _apart(call, read, dim, Effect.ORDER if numbered else Effect.PAIRS)


def mapped(call: OpCall) -> Rows:
    """Of slices along the first dimension, each by itself, and others as they are."""
    _, slices, others = call.args[:3]
    parts = [(each, Rows(Kind.SHARD)) for each in tensors(slices)]
    return _apart(
        call, [*parts, *((each, REPLICATE) for each in others)], 0, Effect.MIX
    )


def _apart(call: OpCall, read: list[Placed] | None, dim: int, effect: Effect) -> Rows:
    """Rows that are apart if what is read has them where it should."""
    right = read is not None and call.fit(read)
    return call.kept(Rows(Kind.SHARD, dim), None if right else effect)


def _dim(call: OpCall) -> int:
    """The dimension of FlexAttention that is cut."""
    rows = [call.of(each) for each in call.args[:3]]
    return next((each.dim for each in rows if each != REPLICATE), 0)


def flex_reads(call: OpCall) -> list[Placed] | None:
    """What FlexAttention on parts reads, each with its placement; None if a graph makes
    something of a row's number."""
    dim, (*tables, mask) = _dim(call), call.args[4]
    of_rows = (*call.args[:3], *tensors(tables))
    read: list[Placed] = [(each, Rows(Kind.SHARD, dim)) for each in of_rows]
    score, given = call.args[3], (*call.args[7:9], (), ())
    for graph, place, captured in ((score, 1 + dim, given[0]), (mask, dim, given[1])):
        taken = _taken(graph, place, len(captured)) if dim < 2 else None
        if taken is None:
            return None
        for value, row in zip(captured, taken, strict=True):
            if row is not None:
                read.append((value, Rows(Kind.SHARD) if row else REPLICATE))
    ways = {(id(value), rows.sharded) for value, rows in read}
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
