"""Rules for products of matrices, convolutions and attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .compute_rules import beside, trailing
from .kinds import SHARED, UNKNOWN, Effect, Kind, OpCall, Rows


def multiplied(roles: str, call: OpCall) -> Rows:
    """Matrix products, to which a bias may be added, by the letters of their
    dimensions: "ik kj ij"."""
    *biases, a, b = list(call.tensors())[:3]
    rows = _multiplied(roles, call, call.of(a), call.of(b))
    return beside(call, rows, *call.aligned(biases, call.out.dim())) if biases else rows


def _multiplied(roles: str, call: OpCall, a: Rows, b: Rows) -> Rows:
    left, right, out = roles.split(" ")
    pairs = (a, left), (b, right)
    letters = "".join(role[rows.dim] for rows, role in pairs if rows.apart)
    letter = letters.replace("k", "")[:1] or "k"
    reduced = [rows for rows in (a, b) if rows.reduced]
    if not letters and len(reduced) < 2:
        return Rows(reduced[0].kind) if reduced else SHARED
    if reduced and letter == "k":
        return call.other(Effect.FUNCTION)
    rows = a if a.apart else b
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
        if not rows.apart and rows != SHARED:
            return UNKNOWN
        places = [dim for dim in range(count) if dim not in new]
        values.append(rows._replace(dim=places[rows.dim]))
    rows, gone = beside(call, *values), call.args[6]
    return Rows(Kind.SUM, cause=rows.cause) if rows.dim in gone else rows.without(gone)


def distances(call: OpCall) -> Rows:
    """cdist, of each row of one matrix to each of another: [.., i, k], [.., j, k]."""
    matrix = call.args[0].dim() == 2
    rows = multiplied("ik jk ij" if matrix else "nik njk nij", call)
    return rows if rows.apart else call.other(Effect.FUNCTION)


def attention(call: OpCall) -> Rows:
    """Of query, key and value [batch, heads, length, width], and a mask that may have
    rows along the same dimension."""
    read = call.args[:3]
    rows, masks = attended(call, read), call.aligned(call.others(read), read[0].dim())
    meets = any(mask.apart and mask.place != rows.place for mask in masks)
    return call.kept(rows, Effect.PAIRS if meets else None)


def with_weights(count: int, call: OpCall) -> Rows:
    """Of the first `count` arguments [batch, length, width], projected by the call's
    own weights."""
    read, mask = call.args[:count], call.get("mask")
    values = [call.of(each) for each in call.others(read) if each is not mask]
    if any(rows.kind is not Kind.SHARED for rows in values):
        return call.other(Effect.MIX)
    return attended(call, read)


def attended(call: OpCall, read: Sequence[Tensor]) -> Rows:
    """Of what attends to itself, or one to the other, along the last dimension but
    one."""
    values = [call.of(each) for each in read]
    if any(rows.reduced for rows in values):
        return call.other(Effect.FUNCTION)
    rows = beside(call, *values)
    if not rows.apart:  # a mask alone holds the rows
        rows = next(rows for rows in call.values if rows != SHARED)
    pairs = rows.dim >= call.args[0].dim() - 2
    return call.kept(rows, Effect.PAIRS if pairs else None)


def convolution(call: OpCall) -> Rows:
    """Of inputs [batch, channels, ..] with weights, which may be of groups."""
    rows, weight = call.of(call.args[0]), call.of(call.args[1])
    grouped = rows.dim == 1 and call.get("groups", 1) % call.size == 0
    if rows.apart and weight.apart and grouped and rows.outer == 1:
        return rows
    if weight.kind is not Kind.SHARED:
        return call.other(Effect.MIX)
    return trailing(lambda call, x: x.dim() - 1, call)
