"""What is known of operators of users: what becomes of rows and other parts in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from ..ir.graphs import named_arguments, tensors
from .compute_rules import beside
from .kinds import SHARED, Cause, Effect, Kind, OpCall, Rows, first_cause

Placed = tuple[Tensor, Rows]


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
    forward, values = DECLARED[call.target].forward, call.values
    if forward is None:
        apart = any(rows.apart for rows in values) and not call.whole
        return beside(call, *values) if apart else Rows(Kind.UNKNOWN)
    found, cause = _fitting(call), first_cause(values)
    if found is None or (call.whole and backward_meets(call)):
        return call.other(Effect.MIX, *values)
    return [rows._replace(cause=cause) for _, rows in _outputs(call, found.outputs)]


def parts(call: OpCall) -> list[tuple[Tensor, int]] | None:
    """The tensors of which a call on parts reads parts, and along which dimension; None
    if that isn't known."""
    found = _fitting(call)
    if found is None:
        return None
    inputs = _inputs(call, found.inputs)
    return [(tensor, rows.dim) for tensor, rows in inputs if rows.apart]


def backward_meets(call: OpCall) -> Cause | None:
    """Where parts meet in the backward of a call, if they do and F has them apart."""
    found, backward = _fitting(call), DECLARED[call.target].backward
    if found is None or backward is None:
        return None
    inputs, outputs = _inputs(call, found.inputs), _outputs(call, found.outputs)
    for strategy in backward:
        arriving = _outputs(call, strategy.inputs)
        given = _inputs(call, strategy.outputs)
        if _are_gradients(outputs, arriving) and _are_gradients(inputs, given):
            return None
    return Cause(Effect.BACKWARD, str(call.target), call.stack)


def lacks_dims(node: fx.Node) -> bool:
    """Whether all that is said of a node's operator is of tensors that have more
    dimensions than the node's."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), _example)
    call = OpCall(node.target, args, kwargs, _example(node), lambda _: SHARED, 1, None)
    forward = DECLARED[node.target].forward or ()
    return bool(forward) and not any(_has_dims(call, each) for each in forward)


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _has_dims(call: OpCall, strategy: Strategy) -> bool:
    """Whether tensors have the dimensions along which they are said to be parts."""
    pairs = *_inputs(call, strategy.inputs), *_outputs(call, strategy.outputs)
    return all(not rows.apart or 0 <= rows.dim < each.dim() for each, rows in pairs)


def _are_gradients(values: Sequence[Placed], gradients: Sequence[Placed]) -> bool:
    """Whether these are the placements of the gradients of values that have some."""
    return all(
        gradient == rows.of_gradient
        for (tensor, rows), (_, gradient) in zip(values, gradients, strict=True)
        if tensor.is_floating_point() or tensor.is_complex()
    )


def _fitting(call: OpCall) -> Strategy | None:
    """The first of what is said that the rows of a call's arguments fit."""
    for strategy in DECLARED[call.target].forward or ():
        pairs = _inputs(call, strategy.inputs)
        if _has_dims(call, strategy) and all(call.fits(*each) for each in pairs):
            return strategy
    return None


def _inputs(call: OpCall, placed: Sequence[Rows]) -> list[Placed]:
    values = [*named_arguments(call).values()]
    return _pairs(call.target._schema.arguments, values, placed)


def _outputs(call: OpCall, placed: Sequence[Rows]) -> list[Placed]:
    fields = call.target._schema.returns
    return _pairs(fields, call.out if len(fields) > 1 else [call.out], placed)


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
