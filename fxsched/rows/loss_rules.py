"""Rules for losses that are one operation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .compute_rules import beside, pointwise
from .kinds import Effect, Kind, OpCall, Rows


def losses(call: OpCall) -> Rows:
    """Element by element, then reduced as the argument `reduction` says."""
    values = [call.of(tensor) for tensor in call.tensors()]
    whole = call._replace(out=max(call.tensors(), key=Tensor.dim))  # not reduced yet
    return _by_reduction(call, call.get("reduction", 1), pointwise(whole), values)


def _by_reduction(
    call: OpCall, reduction: int, rows: Rows, values: Sequence[Rows]
) -> Rows:
    if reduction == 0:
        return rows
    if rows.kind is not Kind.APART:
        return Rows(Kind.OTHER, cause=call.mixed(Effect.FUNCTION, *values))
    return Rows(Kind.MEAN if reduction == 1 else Kind.SUM, cause=rows.cause)


def nll_loss(call: OpCall) -> Sequence[Rows]:
    """Of log probabilities [n, classes, ..] and labels [n, ..]; the mean is one over
    equal parts only where no label is ignored, which tracker.py notes."""
    scores, labels = call.of(call.args[0]), call.of(call.args[1])
    weight = call.get("weight")
    values = [scores, labels]
    apart = [rows for rows in values if rows.kind is Kind.APART]
    if not apart or any(rows.reduced for rows in values):
        cause = call.mixed(Effect.FUNCTION, *values)
        return [Rows(Kind.OTHER, cause=cause)] * 2
    rows = beside(call, *values) if len(apart) > 1 else apart[0]
    if labels.numbers:
        rows = rows._replace(cause=call.mixed(Effect.ORDER, *values))
    elif scores.kind is Kind.APART and scores.dim == 1:
        rows = rows._replace(cause=call.mixed(Effect.MIX, *values))
    reduction = call.get("reduction", 1)
    loss = _by_reduction(call, reduction, rows, values)
    if reduction == 1 and weight is not None:
        loss = Rows(Kind.OTHER, cause=call.mixed(Effect.RATIO, *values))
    return [loss, Rows(Kind.SUM, cause=labels.cause)]
