"""Rules for operations that move values without computing: where the rows go."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from ..ir.graphs import tensors
from .compute_rules import beside
from .kinds import UNKNOWN, Effect, Kind, OpCall, Rows, Rule

Moved = Rows | Sequence[Rows]


def _moves(rule: Callable[[OpCall, Tensor, Rows], Moved]) -> Rule:
    """A rule for what moves the rows of one tensor; what has none apart stays so."""

    def guarded(call: OpCall) -> Moved:
        tensor = call.args[0]
        rows = call.of(tensor)
        return rule(call, tensor, rows) if rows.apart else rows

    return guarded


@_moves
def reshaped(call: OpCall, tensor: Tensor, rows: Rows) -> Rows:
    """view, flatten and such: the order of the elements stays."""
    before = math.prod(map(int, tensor.shape[: rows.dim])) * rows.outer
    reach = 1
    for dim, size in enumerate(map(int, call.out.shape)):
        if reach * size > before or (call.size == 1 and reach * size == before):
            outer, rest = divmod(before, reach)
            if rest or size % (outer * call.size):
                break
            return rows._replace(dim=dim, outer=outer)
        reach *= size
    return UNKNOWN


@_moves
def rearranged(call: OpCall, tensor: Tensor, rows: Rows) -> Rows:
    """Dimensions in another order, a new one of length 1, or two that become one at
    their end (diagonal)."""
    order: list[int | None] = [*range(tensor.dim())]
    if call.name == "permute":
        order = [d % len(order) for d in call.get("dims")]
    elif call.name == "unsqueeze":
        order.insert(call.dim(call.out), None)
    elif len(order) > 1:
        a, b = call.dim(tensor, "dim0"), call.dim(tensor, "dim1", 1)
        order[a], order[b] = b, a
    return rows._replace(dim=order.index(rows.dim))


@_moves
def expanded(call: OpCall, tensor: Tensor, rows: Rows) -> Rows:
    """expand and repeat; repeated along the batch, its rows come again as a block."""
    dim, times = rows.dim + call.out.dim() - tensor.dim(), call.get("repeats")
    return rows._replace(dim=dim, outer=rows.outer * int(times[dim] if times else 1))


@_moves
def squeezed(call: OpCall, tensor: Tensor, rows: Rows) -> Rows:
    """Without some dimensions of length 1."""
    some = call.dims(tensor) if call.out.dim() < tensor.dim() else ()
    gone = {d for d in some if int(tensor.shape[d]) == 1}
    if rows.dim in gone and call.size > 1:
        return UNKNOWN
    return rows.without(gone)  # a batch of one row keeps its dimension


@_moves
def selected(call: OpCall, tensor: Tensor, rows: Rows) -> Rows:
    """One place of a dimension, which goes."""
    dim = call.dim(tensor)
    if dim != rows.dim:
        return rows.without({dim})
    if rows.outer * call.size == int(tensor.shape[dim]) > call.size == 1:
        return UNKNOWN
    return call.other(Effect.ORDER)


@_moves
def diagonal(call: OpCall, tensor: Tensor, rows: Rows) -> Rows:
    """Two dimensions become one, at their end."""
    gone = {call.dim(tensor, "dim1"), call.dim(tensor, "dim2", 1)}
    return call.other(Effect.ORDER) if rows.dim in gone else rows.without(gone)


@_moves
def parted(call: OpCall, tensor: Tensor, rows: Rows) -> Moved:
    """slice and split: a range of one dimension, or several."""
    dim = call.dim(tensor)
    sizes = [int(part.shape[dim]) for part in tensors(call.out)]
    if dim != rows.dim or sizes == [int(tensor.shape[dim])]:
        return rows
    block = call.size * call.inner(tensor, rows)
    uneven = [int(call.get("start", 0)), *sizes]
    if call.get("step", 1) != 1 or 0 in sizes or any(n % block for n in uneven):
        return call.other(Effect.ORDER)
    return [rows._replace(outer=size // block) for size in sizes]


@_moves
def windowed(call: OpCall, tensor: Tensor, rows: Rows) -> Rows:
    """unfold: windows along one dimension, their elements along a new last one."""
    along = call.dim(tensor, "dimension") == rows.dim
    return call.kept(rows, Effect.MIX if along else None)


@_moves
def strided(call: OpCall, tensor: Tensor, rows: Rows) -> Rows:
    """as_strided and such, where they keep the shape."""
    return rows if call.out.shape == tensor.shape else UNKNOWN


def joined(call: OpCall) -> Rows:
    """cat: along the batch, rows of several tensors lie in blocks."""
    read: list[Tensor] = [t for t in call.get("tensors") if t.numel()]
    values, dim = [call.of(tensor) for tensor in read], call.dim(call.out)
    rows = beside(call, *(r._replace(outer=1) if r.dim == dim else r for r in values))
    if not rows.apart or rows.dim != dim:
        return rows
    inner = {call.inner(t, r) for t, r in zip(read, values, strict=True)}
    if len(inner) > 1 or any(r.kind is Kind.SHARED for r in values):
        return UNKNOWN._replace(cause=rows.cause)
    return rows._replace(outer=sum(r.outer for r in values))


def stacked(call: OpCall) -> Rows:
    """Values side by side along a new dimension."""
    rows = beside(call, *call.values)
    later = rows.apart and rows.dim >= call.dim(call.out)
    return rows._replace(dim=rows.dim + later)
