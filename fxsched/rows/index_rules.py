"""Rules for operations that pick values by index."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .compute_rules import beside
from .kinds import SHARED, UNKNOWN, Effect, Kind, OpCall, Rows, unknown


def embedded(call: OpCall) -> Rows:
    """embedding: rows of a table by index. Gradients may be divided by how often one
    is in the batch."""
    table, index = call.of(call.args[0]), call.of(call.args[1])
    if table.kind is not Kind.SHARED or not index.apart or index.numbers:
        return _reordered(call, table, index)
    if call.get("scale_grad_by_freq"):
        return index._replace(cause=call.mixed(Effect.STATISTICS, index))
    return index


def picked(call: OpCall) -> Rows:
    """fxsched's own: what is computed of as many rows as values say."""
    cause = call.mixed(Effect.PICKED, *call.values)
    if cause.effect is Effect.PICKED:
        cause = cause._replace(operation="a selection")
    return Rows(Kind.OTHER, cause=cause)


def by_sample(call: OpCall) -> Rows:
    """CTC: a loss for each sample, whose targets lie in rows, or one after another."""
    values = call.values
    apart = [rows._replace(cause=None) == Rows(Kind.APART) for rows in values[1:]]
    right = all(apart) and values[0].place == (1, 1) and call.args[1].dim() > 1
    return call.kept(Rows(Kind.APART), None if right else Effect.ORDER, *values)


def _reordered(call: OpCall, rows: Rows, index: Rows) -> Rows:
    """What an index picks of rows, in an order of its own."""
    lost = call.other(Effect.ORDER, rows, index)
    return index._replace(numbers=False, cause=lost.cause) if index.apart else lost


def indexed(call: OpCall) -> Rows:
    """x[i, :, j], in which tensors' dimensions go where the first index stands, or, if
    there are others between them, to the front."""
    tensor, indices = call.args[0], call.args[1]
    rows = call.of(tensor)
    tensors = [(d, i) for d, i in enumerate(indices) if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for _, i in tensors):
        return unknown(rows)
    positions = [d for d, _ in tensors]
    adjacent = positions == list(range(positions[0], positions[-1] + 1))
    start = positions[0] if adjacent else 0
    rank = max(i.dim() for _, i in tensors)
    index = _of_indices(call, [i for _, i in tensors], rank)
    picked = index._replace(dim=index.dim + start)
    if not rows.apart and index.kind is Kind.SHARED:
        return rows
    if rows.kind is Kind.SHARED and picked.apart and not picked.numbers:
        return picked
    if not rows.apart:
        return _reordered(call, rows, picked)
    chosen = indices[rows.dim] if rows.dim in positions else None
    if chosen is not None:
        if call.of(chosen).numbers and _one_row_each(call, tensor, rows):
            return picked._replace(numbers=rows.numbers, cause=rows.cause)
        return _reordered(call, rows, picked)
    left = sum(d not in positions for d in range(rows.dim))
    before = rank if not adjacent or positions[0] < rows.dim else 0
    effect = None if index.kind is Kind.SHARED else Effect.PAIRS
    return call.kept(rows._replace(dim=left + before), effect, rows, index)


def _one_row_each(call: OpCall, tensor: Tensor, rows: Rows) -> bool:
    """Whether each place along the dimension is one row."""
    return rows.outer == 1 and call.inner(tensor, rows) == 1


def _of_indices(call: OpCall, indices: Sequence[Tensor], rank: int) -> Rows:
    """The rows of indices that are broadcast to one shape."""
    values = call.aligned(indices, rank)
    apart = [rows for rows in values if rows.apart]
    if not apart:
        return next((rows for rows in values if rows.kind is not Kind.SHARED), SHARED)
    numbers = all(rows.numbers for rows in apart)
    return beside(call, *values)._replace(numbers=numbers)


def written(call: OpCall) -> Rows:
    """index_put: x[i, :, j] = values, which may be a number."""
    tensor, indices, values = call.args[0], call.args[1], call.args[2]
    rows = call.of(tensor)
    new = call.of(values) if isinstance(values, Tensor) else SHARED
    if not rows.apart or new.kind not in (Kind.APART, Kind.SHARED):
        return unknown(rows, new)
    tensors = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in tensors):
        mask = call.of(tensors[0])
        same = len(tensors) == 1 and mask.apart and values.dim() == 0
        return rows if same and mask.place == rows.place else UNKNOWN
    chosen = indices[rows.dim] if rows.dim < len(indices) else None
    rank = max(i.dim() for i in tensors)
    by = _of_indices(call, tensors, rank)
    if chosen is None:
        effect = None if by.kind is Kind.SHARED else Effect.PAIRS
    else:
        own = call.of(chosen).numbers and _one_row_each(call, tensor, rows)
        effect = None if own else Effect.ORDER
    there = indexed(call)
    dim = there.dim - (tensor.dim() - len(tensors) + rank - _rank(values))
    if new.apart and new.place != (dim, there.outer):
        effect = effect or Effect.PAIRS
    elif not new.apart and dim >= 0 and values.shape[dim] != 1:
        effect = Effect.ORDER  # as long as the batch and not of it: of all rows
    return call.kept(rows, effect, rows, by, new)


def _rank(value: object) -> int:
    return value.dim() if isinstance(value, Tensor) else 0


def gathered(call: OpCall) -> Rows:
    """gather and scatter: along one dimension, by an index of the same rank."""
    tensor, index = call.args[0], call.get("index")
    read = [each for each in call.tensors() if each.dim() == tensor.dim()]
    values = [call.of(each) for each in read]
    apart = [rows for rows in values if rows.apart]
    if not apart or any(rows.reduced for rows in values):
        return call.other(Effect.FUNCTION, *values)
    rows, dim = call.of(index), call.dim(tensor)
    # what isn't of the batch but as long as the index was made of the batch's size
    together = all(
        each.place == rows.place
        if each.apart
        else operand.shape[rows.dim] == index.shape[rows.dim]
        for operand, each in zip(read, values, strict=True)
    )
    from_table = call.name == "gather" and call.of(tensor) == SHARED
    right = from_table if dim == rows.dim else together
    if right and rows.apart and not any(r.numbers for r in values):
        return call.kept(rows, None, *values)
    places = {rows.place for rows in apart}
    effect = Effect.PAIRS if len(places) > 1 else Effect.ORDER
    return call.kept(apart[0]._replace(numbers=False), effect, *values)


def placed(call: OpCall) -> Rows:
    """index_add and its like: into places of one dimension, by an index of one."""
    tensor, values = call.args[0], call.get("source", call.get("value"))
    if not call.of(tensor).apart:
        return call.other(Effect.ORDER, *call.values)
    indices = [None] * call.dim(tensor) + [call.get("index")]
    return written(call._replace(args=(tensor, indices, values)))


def taken(call: OpCall) -> Rows:
    """index_select: along one dimension, by an index of one."""
    tensor, index = call.args[0], call.get("index")
    return indexed(call._replace(args=(tensor, [None] * call.dim(tensor) + [index])))
