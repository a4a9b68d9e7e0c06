"""Rules for operations that move values without computing: where the rows go."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..ir.graphs import tensors
from .compute_rules import beside
from .kinds import REPLICATE, UNKNOWN, Cause, Effect, Kind, OpCall, Rows, Rule

Moved = Rows | Sequence[Rows]


def _moves(rule: Callable[[OpCall, Tensor, Rows], Moved]) -> Rule:
    """A rule for what moves the rows of one tensor; what has none apart stays so."""

    def guarded(call: OpCall) -> Moved:
        tensor = call.args[0]
        rows = call.of(tensor)
        return rule(call, tensor, rows) if rows.sharded else rows

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
def paired(call: OpCall, tensor: Tensor, rows: Rows) -> Rows:
    """Pairs of numbers along the last dimension as complex numbers, or back."""
    return rows if rows.dim < call.out.dim() else call.other(Effect.MIX)


@_moves
def strided(call: OpCall, tensor: Tensor, rows: Rows) -> Rows:
    """as_strided and such, where they keep the shape; or take, of each row, numbers of
    its own, as the frames of a short-time Fourier transform."""
    if call.out.shape == tensor.shape:
        return rows
    inside = call.name == "as_strided" and call.out.dim() and tensor.is_contiguous()
    if not inside or rows.place != (0, 1) or call.get("storage_offset") is not None:
        return UNKNOWN  # the offset of a microbatch is another
    (count, *sizes), (each, *strides) = call.out.shape, call.get("stride")
    last = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    apart = count == tensor.shape[0] and each == tensor.stride(0) > last
    return rows if apart else UNKNOWN


def joined(call: OpCall) -> Rows:
    """cat: along the batch, rows of several tensors lie in blocks."""
    read: list[Tensor] = [t for t in call.get("tensors") if t.numel()]
    values, dim = [call.of(tensor) for tensor in read], call.dim(call.out)
    rows = beside(call, *(r._replace(outer=1) if r.dim == dim else r for r in values))
    if not rows.sharded or rows.dim != dim:
        return rows
    inner = {call.inner(t, r) for t, r in zip(read, values, strict=True)}
    if len(inner) > 1 or any(r.kind is Kind.REPLICATE for r in values):
        return UNKNOWN._replace(cause=rows.cause)
    return rows._replace(outer=sum(r.outer for r in values))


def stacked(call: OpCall) -> Rows:
    """Values side by side along a new dimension."""
    rows = beside(call, *call.values)
    later = rows.sharded and rows.dim >= call.dim(call.out)
    return rows._replace(dim=rows.dim + later)


def embedded(call: OpCall) -> Rows:
    """embedding: rows of a table by index. Gradients may be divided by how often one
    is in the batch."""
    table, index = call.of(call.args[0]), call.of(call.args[1])
    if table.kind is not Kind.REPLICATE or not index.sharded or index.numbers:
        return _reordered(call, index)
    counted = call.get("scale_grad_by_freq")
    return call.kept(index, Effect.STATISTICS if counted else None)


def chosen_rows(call: OpCall) -> Rows:
    """fxsched's own: what is computed of as many rows as values say."""
    return Rows(Kind.OTHER, cause=Cause(Effect.PICKED, "a selection", call.stack))


def by_sample(call: OpCall) -> Rows:
    """CTC: a loss for each sample, whose targets lie in rows, or one after another."""
    scores, *others = call.values
    apart = all(rows == Rows(Kind.SHARD) for rows in others)
    right = apart and scores.place == (1, 1) and call.args[1].dim() > 1
    return call.kept(Rows(Kind.SHARD), None if right else Effect.ORDER)


def _reordered(call: OpCall, index: Rows) -> Rows:
    """What an index picks of rows, in an order of its own."""
    rows = index._replace(numbers=False) if index.sharded else Rows(Kind.OTHER)
    return call.kept(rows._replace(cause=None), Effect.ORDER)


def indexed(call: OpCall) -> Rows:
    """x[i, :, j], in which tensors' dimensions go where the first index stands, or, if
    there are others between them, to the front."""
    tensor, indices = call.args[0], call.args[1]
    rows = call.of(tensor)
    positions = [d for d, index in enumerate(indices) if index is not None]
    tensors = [indices[d] for d in positions]
    if any(map(_is_mask, tensors)):
        return UNKNOWN
    adjacent = positions == list(range(positions[0], positions[-1] + 1))
    start = positions[0] if adjacent else 0
    rank = max(i.dim() for i in tensors)
    index = _of_indices(call, tensors, rank)
    picked = index._replace(dim=index.dim + start)
    if not rows.sharded and index.kind is Kind.REPLICATE:
        return rows
    if rows.kind is Kind.REPLICATE and picked.sharded and not picked.numbers:
        return picked
    if not rows.sharded:
        return _reordered(call, picked)
    if rows.dim in positions:
        alone = rows.outer == call.inner(tensor, rows) == 1  # a row at each place
        if alone and call.of(indices[rows.dim]).numbers:
            return picked._replace(numbers=rows.numbers, cause=None)
        return _reordered(call, picked)
    left = sum(d not in positions for d in range(rows.dim))
    before = rank if not adjacent or positions[0] < rows.dim else 0
    effect = None if index.kind is Kind.REPLICATE else Effect.PAIRS
    return call.kept(rows._replace(dim=left + before), effect)


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _of_indices(call: OpCall, indices: Sequence[Tensor], rank: int) -> Rows:
    """The rows of indices that are broadcast to one shape."""
    values = call.aligned(indices, rank)
    apart = [rows for rows in values if rows.sharded]
    if not apart:
        return next(
            (rows for rows in values if rows.kind is not Kind.REPLICATE), REPLICATE
        )
    numbers = all(rows.numbers for rows in apart)
    return beside(call, *values)._replace(numbers=numbers)


def written(call: OpCall) -> Rows:
    """index_put: x[i, :, j] = values, which may be a number."""
    tensor, indices, values = call.args[0], call.args[1], call.args[2]
    rows = call.of(tensor)
    new = call.of(values) if isinstance(values, Tensor) else REPLICATE
    if not rows.sharded or new.kind not in (Kind.SHARD, Kind.REPLICATE):
        return UNKNOWN
    tensors = [i for i in indices if i is not None]
    if any(map(_is_mask, tensors)):
        return UNKNOWN
    there, rank = indexed(call), max(i.dim() for i in tensors)
    count = values.dim() if isinstance(values, Tensor) else 0
    dim = there.dim - (tensor.dim() - len(tensors) + rank - count)
    effect = None
    if new.sharded and new.place != (dim, there.outer):
        effect = Effect.PAIRS
    elif not new.sharded and dim >= 0 and values.shape[dim] != 1:
        effect = Effect.ORDER  # as long as the batch and not of it: of all rows
    return call.kept(rows._replace(cause=there.cause), effect)


def gathered(call: OpCall) -> Rows:
    """gather and scatter: along one dimension, by an index of the same rank."""
    tensor, index = call.args[0], call.get("index")
    read = [each for each in call.tensors() if each.dim() == tensor.dim()]
    values = [call.of(each) for each in read]
    apart = [rows for rows in values if rows.sharded]
    if not apart or any(rows.reduced for rows in values):
        return call.other(Effect.FUNCTION)
    rows, dim = call.of(index), call.dim(tensor)
    # what isn't of the batch but as long as the index was made of the batch's size
    together = all(
        each.place == rows.place
        if each.sharded
        else operand.shape[rows.dim] == index.shape[rows.dim]
        for operand, each in zip(read, values, strict=True)
    )
    from_table = call.name == "gather" and call.of(tensor) == REPLICATE
    right = from_table if dim == rows.dim else together
    if right and rows.sharded and not any(r.numbers for r in values):
        return rows
    several = len({rows.place for rows in apart}) > 1
    effect = Effect.PAIRS if several else Effect.ORDER
    return call.kept(apart[0]._replace(numbers=False), effect)


def placed(call: OpCall) -> Rows:
    """index_add and its like: into places of one dimension, by an index of one."""
    tensor, values = call.args[0], call.get("source", call.get("value"))
    if not call.of(tensor).sharded:
        return call.other(Effect.ORDER)
    indices = [None] * call.dim(tensor) + [call.get("index")]
    return written(call._replace(args=(tensor, indices, values)))


def taken(call: OpCall) -> Rows:
    """index_select: along one dimension, by an index of one."""
    tensor, index = call.args[0], call.get("index")
    return indexed(call._replace(args=(tensor, [None] * call.dim(tensor) + [index])))
