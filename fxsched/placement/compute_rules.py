"""Rules for operations that compute: whether rows stay apart, add up, or mix."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from torch import Tensor

from ..ir.graphs import tensors
from .kinds import REPLICATE, UNKNOWN, Effect, Kind, OpCall, Rows, first_cause

CASTS = ("_to_copy", "clone", "detach", "alias", "copy", "lift_fresh")


def beside(call: OpCall, *values: Rows) -> Rows:
    """Values of one shape side by side, or added up."""
    apart, effect = [rows for rows in values if rows.sharded], None
    if not apart:
        rows = added_up(call, {rows.kind for rows in values})
    else:
        rows = apart[0]._replace(numbers=any(rows.numbers for rows in apart))
        if any(each.reduced for each in values):
            effect = Effect.STATISTICS
        if any(each.place != rows.place for each in apart):
            effect = Effect.PAIRS
    return call.kept(rows._replace(cause=first_cause(values) or rows.cause), effect)


def added_up(call: OpCall, kinds: set[Kind]) -> Rows:
    """What sums, means and shared values add up to."""
    if kinds <= {Kind.MEAN, Kind.REPLICATE}:
        return Rows(Kind.MEAN if Kind.MEAN in kinds else Kind.REPLICATE)
    if kinds == {Kind.SUM}:
        return Rows(Kind.SUM)
    return call.other(Effect.CONSTANT if Kind.REPLICATE in kinds else Effect.BOTH)


def pointwise(call: OpCall) -> Rows:
    """Element by element, shapes broadcast; what else it gives, its gradient needs."""
    aligned = call.aligned(call.tensors(), next(tensors(call.out)).dim())
    rows = beside(call, *aligned)
    if not rows.sharded:
        return _of_reduced(call, aligned)
    if rows.numbers and call.name not in CASTS:
        return call.kept(rows._replace(numbers=False, cause=None), Effect.ORDER)
    return rows


def _of_reduced(call: OpCall, values: Sequence[Rows]) -> Rows:
    """Sums and means over the batch, in arithmetic."""
    kinds, name = {rows.kind for rows in values}, call.name
    reduced = [rows for rows in values if rows.reduced]
    if not reduced:
        return REPLICATE
    if name in CASTS or name == "neg":
        return reduced[0]
    if name in ("add", "sub", "rsub"):
        number = not isinstance(call.args[1], Tensor) and call.args[1] != 0
        return added_up(call, kinds | ({Kind.REPLICATE} if number else set()))
    if name == "mul" and len(reduced) == 1:
        return Rows(reduced[0].kind)
    if name == "div" and call.get("rounding_mode") is None:
        by = call.args[1]
        if not isinstance(by, Tensor) or call.of(by).kind is Kind.REPLICATE:
            return Rows(reduced[0].kind)
        if values[0].kind is Kind.SUM and values[1].numbers:  # by the batch's size
            return Rows(Kind.MEAN)
        if len(reduced) == 2:
            return call.other(Effect.RATIO)
    if name == "where" and len(kinds) == 1:
        return Rows(kinds.pop())
    return call.other(Effect.FUNCTION)


def filled(call: OpCall) -> Rows:
    """A new tensor that takes no more than its shape from another, or not even that
    (new_zeros): Dynamo's symbols say of those whether they have rows."""
    rows, *others = call.values
    if any(other.kind is not Kind.REPLICATE for other in others):
        return pointwise(call)
    if not rows.sharded or call.name.startswith("new_"):
        return REPLICATE
    return rows._replace(numbers=False)


def recurrent(call: OpCall) -> Rows | Sequence[Rows]:
    """A layer over [time, batch, features], or batch first, where the operation does
    that itself; its states are [..., batch, features]."""
    rows = call.of(call.args[0])
    if not rows.sharded:
        return UNKNOWN
    first = call.get("batch_first") and call.name != "mkldnn_rnn_layer"
    mixed = rows.dim != (0 if first else 1) or any(r.reduced for r in call.values)
    rows = call.kept(rows, Effect.MIX if mixed else None)
    return [rows, *(rows._replace(dim=max(s.dim() - 2, 0)) for s in call.out[1:])]


def reduced(kind: Kind, effect: Effect, call: OpCall) -> Rows:
    """Over some dimensions, or all: with rows along none of them, they stay apart."""
    tensor = call.args[0]
    rows, dims = call.of(tensor), call.dims(tensor)
    if rows.reduced:
        other = Kind.OTHER in (kind, rows.kind)
        return call.other(Effect.FUNCTION) if other else Rows(rows.kind)
    if rows.dim not in dims:
        return rows if call.get("keepdim") else rows.without(dims)
    if kind is Kind.OTHER or rows.numbers:
        return call.other(effect)
    return Rows(kind)


def histogram(call: OpCall) -> Rows:
    """histc: a sum over the batch, but between its extremes where no range is given."""
    given = call.get("min", 0) != call.get("max", 0)
    return reduced(Kind.SUM if given else Kind.OTHER, Effect.REDUCTION, call)


def over(
    effect: Effect, dims: Callable[[OpCall, Tensor], Container[int]], call: OpCall
) -> Rows:
    """Along some dimensions, which stay, of the first tensor; the others are apart."""
    rows, *others = call.values
    if not rows.sharded:
        apart = [other for other in others if other.sharded]
        if apart and rows.kind is Kind.REPLICATE:
            return call.kept(apart[0], Effect.STATISTICS)
        return call.other(Effect.FUNCTION)
    if rows.dim in dims(call, next(call.tensors())):
        return call.kept(rows, effect)
    reduced = any(other.reduced for other in others)
    return call.kept(rows, Effect.STATISTICS if reduced else None)


def trailing(width: Callable[[OpCall, Tensor], int], call: OpCall) -> Rows:
    """Over as many of the last dimensions."""

    def last(call: OpCall, x: Tensor) -> Container[int]:
        return range(x.dim() - width(call, x), x.dim())

    return over(Effect.MIX, last, call)


def padded(call: OpCall, x: Tensor) -> set[int]:
    """The dimensions that a pad makes longer or shorter, not those that it names with
    0: its amounts are told from the last dimension on, two for each."""
    amounts = call.args[1]
    return {x.dim() - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0}


def batch_norm(call: OpCall) -> Sequence[Rows]:
    """Normalisation by statistics over the batch, or, in evaluation, by kept ones."""
    rows = call.of(call.args[0])
    training = call.get("training", call.get("train", True))
    # instance_norm lays rows beside channels, each of which has its own statistics
    meets = training and rows.sharded and rows.dim != 1
    rows = call.kept(rows, Effect.STATISTICS if meets else None)
    return [rows, *[REPLICATE] * (len(call.out) - 1)]


def losses(call: OpCall) -> Rows:
    """Element by element, then reduced as the argument `reduction` says."""
    whole = call._replace(out=max(call.tensors(), key=Tensor.dim))  # not reduced yet
    return _by_reduction(call, pointwise(whole))


def _by_reduction(call: OpCall, rows: Rows) -> Rows:
    reduction = call.get("reduction", 1)
    if reduction == 0:
        return rows
    if not rows.sharded:
        return call.other(Effect.FUNCTION)
    return Rows(Kind.MEAN if reduction == 1 else Kind.SUM, cause=rows.cause)


def nll_loss(call: OpCall) -> Sequence[Rows]:
    """Of log probabilities [n, classes, ..] and labels [n, ..]; the mean is one over
    equal parts only where no label is ignored, which tracker.py notes."""
    scores, labels, *weights = call.values
    rows = beside(call, scores, labels)
    if not rows.sharded or scores.reduced or labels.reduced:
        return [call.other(Effect.FUNCTION)] * 2
    if labels.numbers:
        rows = call.kept(rows._replace(cause=None), Effect.ORDER)
    elif scores.sharded and scores.dim == 1:
        rows = call.kept(rows._replace(cause=None), Effect.MIX)
    loss = _by_reduction(call, rows)
    if call.get("reduction", 1) == 1 and weights:
        loss = call.other(Effect.RATIO)
    return [loss, Rows(Kind.SUM)]


def multiplied(roles: str, call: OpCall) -> Rows:
    """Matrix products, to which a bias may be added, by the letters of their
    dimensions: "ik kj ij"."""
    *biases, a, b = list(call.tensors())[:3]
    rows = _multiplied(roles, call, call.of(a), call.of(b))
    return beside(call, rows, *call.aligned(biases, call.out.dim())) if biases else rows


def _multiplied(roles: str, call: OpCall, a: Rows, b: Rows) -> Rows:
    left, right, out = roles.split(" ")
    pairs = (a, left), (b, right)
    letters = "".join(role[rows.dim] for rows, role in pairs if rows.sharded)
    letter = letters.replace("k", "")[:1] or "k"
    reduced = [rows for rows in (a, b) if rows.reduced]
    if not letters and len(reduced) < 2:
        return Rows(reduced[0].kind) if reduced else REPLICATE
    if reduced and letter == "k":
        return call.other(Effect.FUNCTION)
    rows = a if a.sharded else b
    effect = Effect.ORDER if a.numbers or b.numbers else None
    if reduced:
        effect = Effect.STATISTICS
    elif letters != letter and (letters not in ("kk", "nn") or a.outer != b.outer):
        effect = Effect.PAIRS
    rows = Rows(Kind.SUM) if letter == "k" else rows._replace(dim=out.index(letter))
    return call.kept(rows, effect)


def trilinear(call: OpCall) -> Rows:
    """Of bilinear layers: three tensors get new dimensions, are multiplied element by
    element, and summed over some."""
    count = call.args[0].dim() + len(call.args[3])
    values = []
    for tensor, new in zip(call.args[:3], call.args[3:6], strict=True):
        rows = call.of(tensor)
        if not rows.sharded and rows != REPLICATE:
            return UNKNOWN
        places = [dim for dim in range(count) if dim not in new]
        values.append(rows._replace(dim=places[rows.dim]))
    rows, gone = beside(call, *values), call.args[6]
    return Rows(Kind.SUM, cause=rows.cause) if rows.dim in gone else rows.without(gone)


def distances(call: OpCall) -> Rows:
    """cdist, of each row of one matrix to each of another: [.., i, k], [.., j, k]."""
    matrix = call.args[0].dim() == 2
    rows = multiplied("ik jk ij" if matrix else "nik njk nij", call)
    return rows if rows.sharded else call.other(Effect.FUNCTION)


def attention(call: OpCall) -> Rows:
    """Of query, key and value [batch, heads, length, width], and a mask that may have
    rows along the same dimension."""
    read = call.args[:3]
    rows, masks = attended(call, read), call.aligned(call.others(read), read[0].dim())
    meets = any(mask.sharded and mask.place != rows.place for mask in masks)
    return call.kept(rows, Effect.PAIRS if meets else None)


def with_weights(count: int, call: OpCall) -> Rows:
    """Of the first `count` arguments [batch, length, width], projected by the call's
    own weights."""
    read, mask = call.args[:count], call.get("mask")
    values = [call.of(each) for each in call.others(read) if each is not mask]
    if any(rows.kind is not Kind.REPLICATE for rows in values):
        return call.other(Effect.MIX)
    return attended(call, read)


def attended(call: OpCall, read: Sequence[Tensor]) -> Rows:
    """Of what attends to itself, or one to the other, along the last dimension but
    one."""
    values = [call.of(each) for each in read]
    if any(rows.reduced for rows in values):
        return call.other(Effect.FUNCTION)
    rows = beside(call, *values)
    if not rows.sharded:  # a mask alone holds the rows
        rows = next(rows for rows in call.values if rows != REPLICATE)
    pairs = rows.dim >= call.args[0].dim() - 2
    return call.kept(rows, Effect.PAIRS if pairs else None)


def convolution(call: OpCall) -> Rows:
    """Of inputs [batch, channels, ..] with weights [out, in, ..], which may be of
    groups, or [in, out, ..] if transposed: channels in parts are as columns and rows of
    a matrix."""
    x, weight, *bias = call.values
    groups = call.get("groups", 1)
    grouped = x.sharded and weight.sharded and x.place == (1, 1)
    if grouped and groups % call.size == 0:
        return x
    if call.whole and groups == 1 and all(map(_is_of_channels, (x, weight))):
        roles = "nk kj nj" if call.get("transposed") else "nk jk nj"
        rows = _multiplied(roles, call, x, weight)
        return beside(call, rows, *(each._replace(dim=1) for each in bias))
    if weight.kind is not Kind.REPLICATE:
        return call.other(Effect.MIX)
    return trailing(lambda call, x: x.dim() - 1, call)


def _is_of_channels(rows: Rows) -> bool:
    return rows.kind is Kind.REPLICATE or (rows.sharded and rows.dim < 2)


def group_norm(call: OpCall) -> Rows:
    """Whole groups of channels stay apart, as whole images do."""
    x, *weights = call.values
    apart = call.whole and x.sharded and x.place == (1, 1)
    beside = all(rows in (REPLICATE, x._replace(dim=0)) for rows in weights)
    if apart and beside and call.get("group") % call.size == 0:
        return x
    return trailing(lambda call, x: x.dim() - 1, call)
