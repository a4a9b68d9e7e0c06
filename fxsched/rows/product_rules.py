"""Rules for products of matrices, convolutions and attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .compute_rules import added_up, beside, trailing
from .kinds import SHARED, Effect, Kind, OpCall, Rows, first_cause, unknown


def multiplied(roles: str, call: OpCall) -> Rows:
    """Matrix products, to which a bias may be added, by the letters of their
    dimensions: "ik kj ij"."""
    *biases, a, b = call.values[:3]
    rows = _multiplied(roles, call, a, b)
    for added in biases:
        added = added._replace(dim=added.dim + call.out.dim() - call.args[0].dim())
        if rows.apart or added.apart:
            return beside(call, rows, added)
        if rows.kind is not Kind.SHARED or added.kind is not Kind.SHARED:
            return added_up(call, {rows.kind, added.kind}, [rows, added])
    return rows


def trilinear(call: OpCall) -> Rows:
    """Of bilinear layers: three tensors get new dimensions, are multiplied element by
    element, and summed over some."""
    count = call.args[0].dim() + len(call.args[3])
    values = []
    for tensor, new in zip(call.args[:3], call.args[3:6], strict=True):
        rows = call.of(tensor)
        if not rows.apart and rows != SHARED:
            return unknown(rows)
        places = [dim for dim in range(count) if dim not in new]
        values.append(rows._replace(dim=places[rows.dim]))
    rows, gone = beside(call, *values), call.args[6]
    if rows.dim in gone:
        return Rows(Kind.SUM, cause=rows.cause)
    return rows.without(gone)


def _multiplied(roles: str, call: OpCall, a: Rows, b: Rows) -> Rows:
    left, right, out = roles.split(" ")
    cause = first_cause([a, b])
    if a.reduced or b.reduced:
        return _with_reduced(roles, call, a, b)
    if a.numbers or b.numbers:
        cause = call.mixed(Effect.ORDER, a, b)
    if a.kind is b.kind is Kind.SHARED:
        return SHARED
    if Kind.SHARED in (a.kind, b.kind):
        rows = b if a.kind is Kind.SHARED else a
        role = (right if a.kind is Kind.SHARED else left)[rows.dim]
        if role == "k":
            return Rows(Kind.SUM, cause=cause)
        return rows._replace(dim=out.index(role), cause=cause)
    pair = left[a.dim] + right[b.dim]
    if pair == "kk":
        return Rows(Kind.SUM, cause=cause)
    if pair != "nn" or a.outer != b.outer:
        cause = call.mixed(Effect.PAIRS, a, b)
    role = pair[0] if pair[0] != "k" else pair[1]
    return a._replace(dim=out.index(role), cause=cause)


def _with_reduced(roles: str, call: OpCall, a: Rows, b: Rows) -> Rows:
    left, right, out = roles.split(" ")
    if Kind.SHARED in (a.kind, b.kind):
        kind = a.kind if a.reduced else b.kind
        return Rows(kind, cause=first_cause([a, b]))
    apart, role = (a, left) if a.apart else (b, right)
    if not apart.apart or role[apart.dim] == "k":
        return call.other(Effect.FUNCTION, a, b)
    apart = apart._replace(dim=out.index(role[apart.dim]))
    return call.kept(apart, Effect.STATISTICS, a, b)


def distances(call: OpCall) -> Rows:
    """cdist, of each row of one matrix to each of another: [.., i, k], [.., j, k]."""
    matrix = call.args[0].dim() == 2
    rows = multiplied("ik jk ij" if matrix else "nik njk nij", call)
    return rows if rows.apart else call.other(Effect.FUNCTION, rows)


def attention(call: OpCall) -> Rows:
    """Of query, key and value [batch, heads, length, width], and a mask that may have
    rows along the same dimension."""
    rows, read = attended(call, call.args[:3]), call.args[:3]
    for mask in call.aligned(call.others(read), read[0].dim()):
        if mask.apart and mask.place != rows.place:
            rows = call.kept(rows, Effect.PAIRS, rows, mask)
    return rows


def with_weights(count: int, call: OpCall) -> Rows:
    """Of the first `count` arguments [batch, length, width], projected by the call's
    own weights."""
    read, mask = call.args[:count], call.get("mask")
    values = [call.of(each) for each in call.others(read) if each is not mask]
    if any(rows.kind is not Kind.SHARED for rows in values):
        return call.other(Effect.MIX, *values)
    return attended(call, read)


def attended(call: OpCall, read: Sequence[Tensor]) -> Rows:
    """Of what attends to itself, or one to the other, along the last dimension but
    one."""
    values = [call.of(each) for each in read]
    if any(rows.reduced for rows in values):
        return call.other(Effect.FUNCTION, *values)
    apart = [rows for rows in values if rows.apart]
    if not apart:  # a mask alone holds the rows
        apart = [rows for rows in call.values if rows != SHARED]
    rows = beside(call, *values) if len(apart) > 1 else apart[0]
    cause = rows.cause or first_cause(call.values)
    if rows.dim >= call.args[0].dim() - 2:
        cause = call.mixed(Effect.PAIRS, *values)
    return rows._replace(cause=cause)


def convolution(call: OpCall) -> Rows:
    """Of inputs [batch, channels, ..] with weights, which may be of groups."""
    rows, weight = call.of(call.args[0]), call.of(call.args[1])
    grouped = rows.dim == 1 and call.get("groups", 1) % call.size == 0
    if rows.apart and weight.apart and grouped and rows.outer == 1:
        return rows._replace(cause=first_cause([rows, weight]))
    if weight.kind is not Kind.SHARED:
        return call.other(Effect.MIX, rows, weight)
    return trailing(lambda call: call.args[0].dim() - 1, call)
