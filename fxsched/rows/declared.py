"""What is known of operators of users: what becomes of rows and other parts in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from ..ir.graphs import named_arguments, tensors
from .compute_rules import beside
from .kinds import SHARED, Cause, Effect, Kind, OpCall, Rows, first_cause

GRADIENTS = {Kind.SHARED: Kind.SUM, Kind.SUM: Kind.SHARED, Kind.MEAN: Kind.SHARED}


class Strategy(NamedTuple):
    """The placements of an operator's inputs, and of its outputs then."""

    inputs: tuple[Rows, ...]
    outputs: tuple[Rows, ...]


class Declared(NamedTuple):
    """What is said of an operator. forward: None where it keeps rows apart, wherever
    they are; backward: None where it follows from forward."""

    forward: tuple[Strategy, ...] | None = None
    backward: tuple[Strategy, ...] | None = None


DECLARED: dict[Any, Declared] = {}  # by overload


def kept(call: OpCall) -> Rows | Sequence[Rows]:
    """The rule of what is declared."""
    said = DECLARED[call.target]
    values = [call.of(tensor) for tensor in call.tensors()]
    if said.forward is None:
        apart = any(rows.apart for rows in values) and not call.whole
        return beside(call, *values) if apart else Rows(Kind.UNKNOWN)
    found, cause = _fitting(call, said.forward), first_cause(values)
    if found is None or (call.whole and backward_meets(call)):
        return Rows(Kind.OTHER, cause=call.mixed(Effect.MIX, *values))
    outputs = _pairs(call.target._schema.returns, _results(call), found.outputs)
    return [rows._replace(cause=cause) for _, rows in outputs]


def parts(call: OpCall) -> list[tuple[Tensor, int]] | None:
    """The tensors of which a call on parts reads parts, and along which dimension; None
    if that isn't known."""
    found = _fitting(call, DECLARED[call.target].forward or ())
    if found is None:
        return None
    inputs = _pairs(call.target._schema.arguments, _arguments(call), found.inputs)
    return [(tensor, rows.dim) for tensor, rows in inputs if rows.apart]


def backward_meets(call: OpCall) -> Cause | None:
    """Where parts meet in the backward of a call, if they do and F has them apart."""
    said = DECLARED[call.target]
    found = _fitting(call, said.forward or ())
    if found is None or said.backward is None:
        return None
    schema, arguments = call.target._schema, _arguments(call)
    inputs = [*_pairs(schema.arguments, arguments, found.inputs)]
    outputs = [*_pairs(schema.returns, _results(call), found.outputs)]
    for strategy in said.backward:
        arriving = _pairs(schema.returns, _results(call), strategy.inputs)
        given = _pairs(schema.arguments, arguments, strategy.outputs)
        if _are_gradients(outputs, arriving) and _are_gradients(inputs, given):
            return None
    return Cause(Effect.BACKWARD, str(call.target), call.stack)


def lacks_dims(node: fx.Node) -> bool:
    """Whether all that is said of a node's operator is of tensors that have more
    dimensions than the node's."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), _example)
    call = OpCall(node.target, args, kwargs, _example(node), lambda _: SHARED, 1, None)
    forward = DECLARED[node.target].forward
    return bool(forward) and not any(_has_dims(call, each) for each in forward or ())


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _has_dims(call: OpCall, strategy: Strategy) -> bool:
    """Whether tensors have the dimensions along which they are said to be parts."""
    schema = call.target._schema
    inputs = _pairs(schema.arguments, _arguments(call), strategy.inputs)
    outputs = _pairs(schema.returns, _results(call), strategy.outputs)
    return all(
        not rows.apart or 0 <= rows.dim < tensor.dim()
        for tensor, rows in (*inputs, *outputs)
    )


def _are_gradients(
    values: Sequence[tuple[Tensor, Rows]], gradients: Iterator[tuple[Tensor, Rows]]
) -> bool:
    """Whether these are the placements of the gradients of values that have some."""
    return all(
        gradient == rows._replace(kind=GRADIENTS.get(rows.kind, rows.kind))
        for (tensor, rows), (_, gradient) in zip(values, gradients, strict=True)
        if tensor.is_floating_point() or tensor.is_complex()
    )


def _fitting(call: OpCall, strategies: Sequence[Strategy]) -> Strategy | None:
    """The first that the rows of a call's arguments fit."""
    for strategy in strategies:
        pairs = _pairs(call.target._schema.arguments, _arguments(call), strategy.inputs)
        fit = _has_dims(call, strategy) and all(_fits(call, *each) for each in pairs)
        if fit:
            return strategy
    return None


def _fits(call: OpCall, tensor: Tensor, wanted: Rows) -> bool:
    rows = call.of(tensor)
    if rows == SHARED and wanted.kind is Kind.APART:
        return call.whole or tensor.shape[wanted.dim] == 1
    return rows._replace(cause=None) == wanted


def _arguments(call: OpCall) -> list[Any]:
    return [*named_arguments(call).values()]


def _results(call: OpCall) -> Sequence[Any]:
    several = len(call.target._schema.returns) > 1
    return call.out if several else [call.out]


def _pairs(
    fields: Sequence[Any], values: Sequence[Any], placed: Sequence[Rows]
) -> Iterator[tuple[Tensor, Rows]]:
    """Tensors with their placements, whose dimensions are counted from the first."""
    each = iter(placed)
    for field, value in zip(fields, values, strict=True):
        if "Tensor" in str(field.type):
            rows = next(each)
            for tensor in tensors(value):
                negative = rows.dim < 0
                dim = rows.dim + negative * tensor.dim()
                yield tensor, rows._replace(dim=dim)
