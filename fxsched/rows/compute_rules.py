"""Rules for operations that compute: whether rows stay apart, add up, or mix."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from torch import Tensor

from ..ir.graphs import tensors
from .kinds import SHARED, Effect, Kind, OpCall, Rows, first_cause, unknown


def pointwise(call: OpCall) -> Rows:
    """Element by element, shapes broadcast."""
    ranks = max(out.dim() for out in tensors(call.out))
    aligned = call.aligned(call.tensors(), ranks)
    apart = [rows for rows in aligned if rows.apart]
    if not apart:
        return _of_reduced(call, aligned)
    if any(rows.numbers for rows in apart) and call.name not in CASTS:
        return call.kept(apart[0]._replace(numbers=False), Effect.ORDER, *aligned)
    return beside(call, *aligned)


def copied(call: OpCall) -> Rows:
    """copy: what is written over counts for its shape."""
    values = call.values
    if len(values) < 2 or any(rows.apart for rows in values):
        return pointwise(call)
    return values[1]


def shrunk(call: OpCall) -> Rows:
    """embedding_renorm_: the weights that are looked up, however often, alike."""
    return call.of(call.args[0])


def pointwise_first(call: OpCall) -> Rows:
    """Which gives what its gradient needs beside its result, as log_sigmoid does."""
    return pointwise(call._replace(out=call.out[0]))


def recurrent(call: OpCall) -> Rows | Sequence[Rows]:
    """A layer over [time, batch, features], or batch first, where the operation does
    that itself; its states are [..., batch, features]."""
    rows = call.of(call.args[0])
    if not rows.apart:
        return unknown(rows)
    values = call.values
    first = call.get("batch_first") and call.name != "mkldnn_rnn_layer"
    mixed = rows.dim != (0 if first else 1) or any(each.reduced for each in values)
    rows = call.kept(rows, Effect.MIX if mixed else None, *values)
    return [rows, *(rows._replace(dim=max(s.dim() - 2, 0)) for s in call.out[1:])]


CASTS = ("_to_copy", "clone", "detach", "alias", "copy", "lift_fresh")


def _of_reduced(call: OpCall, values: Sequence[Rows]) -> Rows:
    """Sums and means over the batch, in arithmetic."""
    kinds = {rows.kind for rows in values}
    reduced = [rows for rows in values if rows.reduced]
    if not reduced:
        return SHARED
    cause, name = first_cause(values), call.name
    if name in CASTS or name == "neg":
        return reduced[0]._replace(cause=cause)
    if name in ("add", "sub", "rsub"):
        number = not isinstance(call.args[1], Tensor) and call.args[1] != 0
        return added_up(call, kinds | ({Kind.SHARED} if number else set()), values)
    if name == "mul" and len(reduced) == 1:
        return Rows(reduced[0].kind, cause=cause)
    if name == "div" and call.get("rounding_mode") is None:
        by = call.args[1]
        if not isinstance(by, Tensor) or call.of(by).kind is Kind.SHARED:
            return Rows(reduced[0].kind, cause=cause)
        if values[0].kind is Kind.SUM and values[1].numbers:  # by the batch's size
            return Rows(Kind.MEAN, cause=cause)
        if len(reduced) == 2:
            return call.other(Effect.RATIO, *values)
    if name == "where" and len(kinds) == 1:
        return Rows(kinds.pop(), cause=cause)
    return call.other(Effect.FUNCTION, *values)


def added_up(call: OpCall, kinds: set[Kind], values: Sequence[Rows]) -> Rows:
    """What sums, means and shared values add up to."""
    if kinds <= {Kind.MEAN, Kind.SHARED}:
        return Rows(Kind.MEAN, cause=first_cause(values))
    if kinds == {Kind.SUM}:
        return Rows(Kind.SUM, cause=first_cause(values))
    effect = Effect.CONSTANT if Kind.SHARED in kinds else Effect.BOTH
    return call.other(effect, *values)


def reduced(kind: Kind, effect: Effect, call: OpCall) -> Rows:
    """Over some dimensions, or all: with rows along none of them, they stay apart."""
    tensor = call.args[0]
    rows, dims = call.of(tensor), call.dims(tensor)
    if rows.reduced:
        if Kind.OTHER in (kind, rows.kind):
            return call.other(Effect.FUNCTION, rows)
        return Rows(rows.kind, cause=rows.cause)
    if rows.dim not in dims:
        return rows if call.get("keepdim") else rows.without(dims)
    if kind is Kind.OTHER or rows.numbers:
        return call.other(effect, rows)
    return Rows(kind, cause=rows.cause)


def histogram(call: OpCall) -> Rows:
    """histc: a sum over the batch, but between its extremes where no range is given."""
    given = call.get("min", 0) != call.get("max", 0)
    return reduced(Kind.SUM if given else Kind.OTHER, Effect.REDUCTION, call)


def along(call: OpCall) -> Rows:
    """softmax, sort, cumsum: along dimensions that stay; roll without any goes through
    all elements."""
    return _over(call.dims(call.args[0]), Effect.ORDER, call)


def renorm(call: OpCall) -> Rows:
    """Slices along a dimension, each over all the others."""
    tensor = call.args[0]
    return _over(set(range(tensor.dim())) - call.dims(tensor), Effect.ORDER, call)


def trailing(width: Callable[[OpCall], int], call: OpCall) -> Rows:
    """Over the last dimensions; the ones before them are apart."""
    count = next(call.tensors()).dim()
    return _over(range(count - width(call), count), Effect.MIX, call)


def _over(dims: Container[int], effect: Effect, call: OpCall) -> Rows:
    rows, *others = values = call.values
    if not rows.apart:
        apart = [other for other in others if other.apart]
        if apart and rows.kind is Kind.SHARED:
            return call.kept(apart[0], Effect.STATISTICS, *values)
        return call.other(Effect.FUNCTION, *values)
    cause = first_cause(values)
    if any(other.reduced for other in others):
        cause = call.mixed(Effect.STATISTICS, *values)
    if rows.dim in dims:
        cause = call.mixed(effect, rows)
    return rows._replace(cause=cause)


def beside(call: OpCall, *values: Rows) -> Rows:
    """Values of one shape, some of which hold rows."""
    apart = [rows for rows in values if rows.apart]
    cause = first_cause(values)
    if any(rows.reduced for rows in values):
        cause = call.mixed(Effect.STATISTICS, *values)
    if any(rows.place != apart[0].place for rows in apart):
        cause = call.mixed(Effect.PAIRS, *values)
    numbers = any(rows.numbers for rows in apart)
    return apart[0]._replace(cause=cause, numbers=numbers)


def batch_norm(call: OpCall) -> Sequence[Rows]:
    """Normalisation by statistics over the batch, or, in evaluation, by kept ones."""
    tensor = call.args[0]
    rows = call.of(tensor)
    training = call.get("training", call.get("train", True))
    # instance_norm lays rows beside channels, each of which has its own statistics
    if training and rows.apart and rows.dim != 1:
        rows = rows._replace(cause=call.mixed(Effect.STATISTICS, rows))
    return [rows, *[SHARED] * (len(call.out) - 1)]


def filled(call: OpCall) -> Rows:
    """A new tensor that takes no more than its shape from another, or not even that
    (new_zeros): Dynamo's symbols say of those whether they have rows."""
    rows, *others = call.values
    if any(other.kind is not Kind.SHARED for other in others):
        return pointwise(call)
    if not rows.apart or call.name.startswith("new_"):
        return SHARED
    return rows._replace(numbers=False, cause=None)


def losses(call: OpCall) -> Rows:
    """Element by element, then reduced as the argument `reduction` says."""
    whole = call._replace(out=max(call.tensors(), key=Tensor.dim))  # not reduced yet
    return _by_reduction(call, pointwise(whole), call.values)


def _by_reduction(call: OpCall, rows: Rows, values: Sequence[Rows]) -> Rows:
    reduction = call.get("reduction", 1)
    if reduction == 0:
        return rows
    if not rows.apart:
        return call.other(Effect.FUNCTION, *values)
    return Rows(Kind.MEAN if reduction == 1 else Kind.SUM, cause=rows.cause)


def nll_loss(call: OpCall) -> Sequence[Rows]:
    """Of log probabilities [n, classes, ..] and labels [n, ..]; the mean is one over
    equal parts only where no label is ignored, which tracker.py notes."""
    scores, labels, *weights = call.values
    values = [scores, labels]
    apart = [rows for rows in values if rows.apart]
    if not apart or any(rows.reduced for rows in values):
        return [call.other(Effect.FUNCTION, *values)] * 2
    rows = beside(call, *values) if len(apart) > 1 else apart[0]
    if labels.numbers:
        rows = rows._replace(cause=call.mixed(Effect.ORDER, *values))
    elif scores.apart and scores.dim == 1:
        rows = rows._replace(cause=call.mixed(Effect.MIX, *values))
    loss = _by_reduction(call, rows, values)
    if call.get("reduction", 1) == 1 and weights:
        loss = call.other(Effect.RATIO, *values)
    return [loss, Rows(Kind.SUM, cause=labels.cause)]
