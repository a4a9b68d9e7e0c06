"""Rules for operations that compute: whether rows stay apart, add up, or mix."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from torch import Tensor

from ..ir.graphs import tensors
from .kinds import SHARED, UNKNOWN, Effect, Kind, OpCall, Rows, first_cause


def pointwise(call: OpCall) -> Rows:
    """Element by element, shapes broadcast."""
    ranks = max(out.dim() for out in tensors(call.out))
    aligned = [
        (r := call.of(t))._replace(dim=r.dim + ranks - t.dim()) for t in call.tensors()
    ]
    apart = [rows for rows in aligned if rows.kind is Kind.APART]
    if not apart:
        return _of_reduced(call, aligned)
    numbers = any(rows.numbers for rows in apart)
    if numbers and call.name not in CASTS:
        return apart[0]._replace(
            cause=call.mixed(Effect.ORDER, *aligned), numbers=False
        )
    return beside(call, *aligned)._replace(numbers=numbers)


def copied(call: OpCall) -> Rows:
    """copy: what is written over counts for its shape."""
    values = [call.of(tensor) for tensor in call.tensors()]
    if len(values) < 2 or any(rows.kind is Kind.APART for rows in values):
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
    if rows.kind is not Kind.APART:
        return UNKNOWN._replace(cause=rows.cause)
    values = [call.of(tensor) for tensor in call.tensors()]
    rows = rows._replace(cause=first_cause(values))
    first = call.get("batch_first") and call.name != "mkldnn_rnn_layer"
    if rows.dim != (0 if first else 1) or any(each.reduced for each in values):
        rows = rows._replace(cause=call.mixed(Effect.MIX, *values))
    return [rows, *(rows._replace(dim=max(s.dim() - 2, 0)) for s in call.out[1:])]


CASTS = ("_to_copy", "clone", "detach", "alias", "copy", "lift_fresh", "contiguous")


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
            return Rows(Kind.OTHER, cause=call.mixed(Effect.RATIO, *values))
    if name == "where" and len(kinds) == 1:
        return Rows(kinds.pop(), cause=cause)
    return Rows(Kind.OTHER, cause=call.mixed(Effect.FUNCTION, *values))


def added_up(call: OpCall, kinds: set[Kind], values: Sequence[Rows]) -> Rows:
    """What sums, means and shared values add up to."""
    if kinds <= {Kind.MEAN, Kind.SHARED}:
        return Rows(Kind.MEAN, cause=first_cause(values))
    if kinds == {Kind.SUM}:
        return Rows(Kind.SUM, cause=first_cause(values))
    effect = Effect.CONSTANT if Kind.SHARED in kinds else Effect.BOTH
    return Rows(Kind.OTHER, cause=call.mixed(effect, *values))


def reduced(kind: Kind, effect: Effect, call: OpCall) -> Rows:
    """Over some dimensions, or all: with rows along none of them, they stay apart."""
    tensor = call.args[0]
    rows, count = call.of(tensor), tensor.dim()
    if rows.reduced:
        if kind is Kind.OTHER or rows.kind is Kind.OTHER:
            return Rows(Kind.OTHER, cause=call.mixed(Effect.FUNCTION, rows))
        return Rows(rows.kind, cause=rows.cause)
    dims = _dims(call, count)
    if rows.dim not in dims:
        gone = 0 if call.get("keepdim", False) else sum(d < rows.dim for d in dims)
        return rows._replace(dim=rows.dim - gone)
    if kind is Kind.OTHER or rows.numbers:
        return Rows(Kind.OTHER, cause=call.mixed(effect, rows))
    return Rows(kind, cause=rows.cause)


def histogram(call: OpCall) -> Rows:
    """histc: a sum over the batch, but between its extremes where no range is given."""
    given = call.get("min", 0) != call.get("max", 0)
    return reduced(Kind.SUM if given else Kind.OTHER, Effect.REDUCTION, call)


def _dims(call: OpCall, count: int) -> set[int]:
    """The dimensions that an operation works along."""
    dims = call.get("dim", call.get("dims"))
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return set(range(count))
    return {d % count for d in ([dims] if isinstance(dims, int) else dims) if count}


def along(call: OpCall) -> Rows:
    """softmax, sort, cumsum: along dimensions that stay; roll without any goes through
    all elements."""
    return _over(call, _dims(call, call.args[0].dim()))


def renorm(call: OpCall) -> Rows:
    """Slices along a dimension, each over all the others."""
    count = call.args[0].dim()
    return _over(call, set(range(count)) - _dims(call, count))


def _over(call: OpCall, dims: Container[int]) -> Rows:
    rows = call.of(call.args[0])
    if rows.reduced:
        return Rows(Kind.OTHER, cause=call.mixed(Effect.FUNCTION, rows))
    if rows.dim in dims:
        return rows._replace(cause=call.mixed(Effect.ORDER, rows))
    return rows


def trailing(width: Callable[[OpCall], int], call: OpCall) -> Rows:
    """Over the last dimensions; the ones before them are apart."""
    tensor = next(call.tensors())
    rows = call.of(tensor)
    others = [call.of(each) for each in call.tensors()][1:]
    if rows.kind is not Kind.APART:
        apart = [other for other in others if other.kind is Kind.APART]
        if apart and rows.kind is Kind.SHARED:
            mixed = call.mixed(Effect.STATISTICS, rows, *others)
            return apart[0]._replace(cause=mixed)
        return Rows(Kind.OTHER, cause=call.mixed(Effect.FUNCTION, rows, *others))
    cause = first_cause([rows, *others])
    if any(other.reduced for other in others):
        cause = call.mixed(Effect.STATISTICS, rows, *others)
    if rows.dim >= tensor.dim() - width(call):
        cause = call.mixed(Effect.MIX, rows)
    return rows._replace(cause=cause)


def beside(call: OpCall, *values: Rows) -> Rows:
    """Values of one shape, some of which hold rows."""
    apart = [rows for rows in values if rows.kind is Kind.APART]
    cause = first_cause(values)
    if any(rows.reduced for rows in values):
        cause = call.mixed(Effect.STATISTICS, *values)
    if any(rows.place != apart[0].place for rows in apart):
        cause = call.mixed(Effect.PAIRS, *values)
    return apart[0]._replace(cause=cause)


def batch_norm(call: OpCall) -> Sequence[Rows]:
    """Normalisation by statistics over the batch, or, in evaluation, by kept ones."""
    tensor = call.args[0]
    rows = call.of(tensor)
    training = call.get("training", call.get("train", True))
    # instance_norm lays rows beside channels, each of which has its own statistics
    if training and rows.kind is Kind.APART and rows.dim != 1:
        rows = rows._replace(cause=call.mixed(Effect.STATISTICS, rows))
    return [rows, *[SHARED] * (len(call.out) - 1)]


def filled(call: OpCall) -> Rows:
    """A new tensor that takes no more than its shape from another, or not even that
    (new_zeros): Dynamo's symbols say of those whether they have rows."""
    rows = call.of(next(call.tensors()))
    if any(call.of(value).kind is not Kind.SHARED for value in [*call.tensors()][1:]):
        return pointwise(call)
    if rows.kind is not Kind.APART or call.name.startswith("new_"):
        return SHARED
    return rows._replace(numbers=False, cause=None)
