"""What is known of operators of users: what becomes of rows and other parts in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx

from ..ir.graphs import named_arguments, tensors
from .compute_rules import beside
from .kinds import SHARED, UNKNOWN, Cause, Effect, OpCall, Placed, Rows


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
        return all(not r.apart or 0 <= r.dim < t.dim() for t, r in self.every)


def kept(call: OpCall) -> Rows | Sequence[Rows]:
    """The rule of what is declared."""
    values = call.values
    if DECLARED[call.target].forward is None:
        apart = any(rows.apart for rows in values) and not call.whole
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
    call = OpCall(node.target, args, kwargs, _example(node), lambda _: SHARED, 1, None)
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
