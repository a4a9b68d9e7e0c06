"""Rules for operations that move values without computing: where the rows go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .kinds import Effect, Kind, OpCall, Rows, first_cause, unknown


def reshaped(call: OpCall) -> Rows:
    """view, flatten and such: the order of the elements stays."""
    tensor, rows = _first(call)
    if not rows.apart:
        return rows
    before = math.prod(map(int, tensor.shape[: rows.dim])) * rows.outer
    reach = 1
    for dim, size in enumerate(map(int, call.out.shape)):
        if reach * size > before or (call.size == 1 and reach * size == before):
            outer, rest = divmod(before, reach)
            if rest or size % (outer * call.size):
                break
            return rows._replace(dim=dim, outer=outer)
        reach *= size
    return unknown(rows)


def permuted(call: OpCall) -> Rows:
    """Dimensions in another order."""
    tensor, rows = _first(call)
    count = tensor.dim()
    dims = [d % count for d in call.get("dims")]
    return rows._replace(dim=dims.index(rows.dim)) if count else rows


def transposed(call: OpCall) -> Rows:
    """Two dimensions change places."""
    tensor, rows = _first(call)
    if tensor.dim() < 2:
        return rows
    a, b = call.dim(tensor, "dim0"), call.dim(tensor, "dim1", 1)
    return rows._replace(dim={a: b, b: a}.get(rows.dim, rows.dim))


def expanded(call: OpCall) -> Rows:
    """expand and repeat; repeated along the batch, its rows come again as a block."""
    tensor, rows = _first(call)
    shift = call.out.dim() - tensor.dim()
    times = call.get("repeats")
    again = int(times[rows.dim + shift]) if times and rows.apart else 1
    return rows._replace(dim=rows.dim + shift, outer=rows.outer * again)


def unsqueezed(call: OpCall) -> Rows:
    """A new dimension of length 1."""
    _, rows = _first(call)
    return rows._replace(dim=rows.dim + (rows.dim >= call.dim(call.out)))


def squeezed(call: OpCall) -> Rows:
    """Without some dimensions of length 1."""
    tensor, rows = _first(call)
    some = call.dims(tensor) if call.out.dim() < tensor.dim() else ()
    gone = {d for d in some if int(tensor.shape[d]) == 1}
    if rows.apart and rows.dim in gone and call.size > 1:
        return unknown(rows)
    return rows.without(gone)  # a batch of one row keeps its dimension


def selected(call: OpCall) -> Rows:
    """One place of a dimension, which goes."""
    tensor, rows = _first(call)
    dim = call.dim(tensor)
    if not rows.apart or dim != rows.dim:
        return rows.without({dim})
    if rows.outer * call.size == int(tensor.shape[dim]) > call.size == 1:
        return unknown(rows)
    return call.other(Effect.ORDER, rows)


def sliced(call: OpCall) -> Rows:
    """A range of a dimension."""
    tensor, rows = _first(call)
    dim = call.dim(tensor)
    if not rows.apart or dim != rows.dim:
        return rows
    size, taken = int(tensor.shape[dim]), int(call.out.shape[dim])
    if size == taken:
        return rows
    block = call.size * call.inner(tensor, rows)
    start = int(call.get("start") or 0)
    whole = taken > 0 and start % block == 0 and taken % block == 0
    if call.get("step", 1) == 1 and whole:
        return rows._replace(outer=taken // block)
    return call.other(Effect.ORDER, rows)


def parted(call: OpCall) -> Rows | Sequence[Rows]:
    """split, chunk: parts along one dimension."""
    tensor, rows = _first(call)
    dim = call.dim(tensor)
    if not rows.apart or dim != rows.dim:
        return rows
    block = call.size * call.inner(tensor, rows)
    sizes = [int(part.shape[dim]) for part in call.out]
    if any(size % block for size in sizes) or 0 in sizes:
        return call.other(Effect.ORDER, rows)
    return [rows._replace(outer=size // block) for size in sizes]


def windowed(call: OpCall) -> Rows:
    """unfold: windows along one dimension, their elements along a new last one."""
    tensor, rows = _first(call)
    if rows.apart and call.dim(tensor, "dimension") == rows.dim:
        return rows._replace(cause=call.mixed(Effect.MIX, rows))
    return rows


def diagonal(call: OpCall) -> Rows:
    """Two dimensions become one, at their end."""
    tensor, rows = _first(call)
    gone = {call.dim(tensor, "dim1"), call.dim(tensor, "dim2", 1)}
    if rows.apart and rows.dim in gone:
        return call.other(Effect.ORDER, rows)
    return rows.without(gone)


def strided(call: OpCall) -> Rows:
    """as_strided, where it keeps the shape."""
    tensor, rows = _first(call)
    return rows if call.out.shape == tensor.shape else unknown(rows)


def joined(call: OpCall) -> Rows:
    """cat: along the batch, rows of several tensors lie in blocks."""
    tensors: list[Tensor] = [t for t in call.get("tensors") if t.numel()]
    values = [call.of(tensor) for tensor in tensors]
    rows = alike(call, values)
    if not rows.apart or rows.dim != call.dim(call.out):
        return rows
    inner = {call.inner(t, r) for t, r in zip(tensors, values, strict=True)}
    if len(inner) > 1 or any(r.kind is Kind.SHARED for r in values):
        return unknown(rows)
    return rows._replace(outer=sum(r.outer for r in values))


def stacked(call: OpCall) -> Rows:
    """Values side by side along a new dimension."""
    rows = alike(call, call.values)
    return rows._replace(dim=rows.dim + (rows.dim >= call.dim(call.out)))


def alike(call: OpCall, values: Sequence[Rows]) -> Rows:
    """Rows of several values side by side, each as it is."""
    apart = [rows for rows in values if rows.apart]
    reduced = [rows for rows in values if rows.reduced]
    cause = first_cause(values)
    if not apart:
        kinds = {rows.kind for rows in reduced}
        kinds |= {Kind.MEAN for rows in values if rows.kind is Kind.SHARED}
        if len(kinds) == 1:
            return Rows(kinds.pop(), cause=cause)
        return call.other(Effect.BOTH, *values)
    if reduced:
        cause = call.mixed(Effect.STATISTICS, *reduced, *apart)
    cat = call.name == "cat"
    if len({rows.dim if cat else rows.place for rows in apart}) > 1:
        cause = call.mixed(Effect.PAIRS, *values)
    numbers = any(rows.numbers for rows in apart)
    return apart[0]._replace(cause=cause, numbers=numbers)


def _first(call: OpCall) -> tuple[Any, Rows]:
    tensor = call.args[0]
    return tensor, call.of(tensor)
