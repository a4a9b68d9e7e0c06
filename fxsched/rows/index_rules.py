"""Rules for operations that pick values by index."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .kinds import SHARED, UNKNOWN, Effect, Kind, OpCall, Rows, first_cause, unknown


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
    cause = first_cause(values)
    if not all(apart) or values[0].place != (1, 1) or call.args[1].dim() < 2:
        cause = call.mixed(Effect.ORDER, *values)
    return Rows(Kind.APART, cause=cause)


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
    beside = positions == list(range(positions[0], positions[-1] + 1))
    start = positions[0] if beside else 0
    rank = max(i.dim() for _, i in tensors)
    index = _of_indices(call, [i for _, i in tensors], rank)
    picked = index._replace(dim=index.dim + start)
    if not rows.apart:
        return _from_shared(call, rows, picked)
    chosen = indices[rows.dim] if rows.dim in positions else None
    if chosen is not None:
        if call.of(chosen).numbers and _one_row_each(call, tensor, rows):
            return picked._replace(numbers=rows.numbers, cause=rows.cause)
        return _reordered(call, rows, picked)
    left = sum(d not in positions for d in range(rows.dim))
    before = rank if not beside or positions[0] < rows.dim else 0
    cause = first_cause([rows, index])
    if index.kind is not Kind.SHARED:
        cause = call.mixed(Effect.PAIRS, rows, index)
    return rows._replace(dim=left + before, cause=cause)


def _one_row_each(call: OpCall, tensor: Tensor, rows: Rows) -> bool:
    """Whether each place along the dimension is one row."""
    return rows.outer == 1 and call.inner(tensor, rows) == 1


def _of_indices(call: OpCall, indices: Sequence[Tensor], rank: int) -> Rows:
    """The rows of indices that are broadcast to one shape."""
    values = [
        (r := call.of(index))._replace(dim=r.dim + rank - index.dim())
        for index in indices
    ]
    apart = [rows for rows in values if rows.apart]
    if not apart:
        return next((rows for rows in values if rows.kind is not Kind.SHARED), SHARED)
    cause = first_cause(values)
    if any(rows.place != apart[0].place for rows in apart):
        cause = call.mixed(Effect.PAIRS, *values)
    numbers = all(rows.numbers for rows in apart)
    return apart[0]._replace(cause=cause, numbers=numbers)


def _from_shared(call: OpCall, rows: Rows, picked: Rows) -> Rows:
    """What indices pick from a value that holds no rows."""
    if picked.kind is Kind.SHARED:
        return rows
    cause = first_cause([rows, picked])
    if rows.kind is not Kind.SHARED or picked.numbers:
        cause = call.mixed(Effect.ORDER, rows, picked)
    return picked._replace(numbers=False, cause=cause)


def written(call: OpCall) -> Rows:
    """index_put: x[i, :, j] = values."""
    tensor, indices, values = call.args[0], call.args[1], call.args[2]
    rows, new = call.of(tensor), call.of(values)
    if not rows.apart or new.kind not in (Kind.APART, Kind.SHARED):
        return unknown(rows, new)
    tensors = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in tensors):
        mask = call.of(tensors[0])
        same = len(tensors) == 1 and mask.apart and values.dim() == 0
        return rows if same and mask.place == rows.place else UNKNOWN
    chosen = indices[rows.dim] if rows.dim < len(indices) else None
    by = _of_indices(call, tensors, max(i.dim() for i in tensors))
    cause = first_cause([rows, new, by])
    if chosen is None:
        if by.kind is not Kind.SHARED:
            cause = call.mixed(Effect.PAIRS, rows, by)
    elif not (call.of(chosen).numbers and _one_row_each(call, tensor, rows)):
        cause = call.mixed(Effect.ORDER, rows, by)
    return rows._replace(cause=cause)


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
    beside = all(
        each.place == rows.place
        if each.apart
        else operand.shape[rows.dim] == index.shape[rows.dim]
        for operand, each in zip(read, values, strict=True)
    )
    from_table = call.name == "gather" and call.of(tensor) == SHARED
    right = from_table if dim == rows.dim else beside
    if right and rows.apart and not any(r.numbers for r in values):
        return rows._replace(cause=first_cause(values))
    places = {rows.place for rows in apart}
    effect = Effect.PAIRS if len(places) > 1 else Effect.ORDER
    return apart[0]._replace(numbers=False, cause=call.mixed(effect, *values))


def placed(call: OpCall) -> Rows:
    """index_add and its like: into places of one dimension, by an index of one."""
    tensor, index, source = call.args[0], call.of(call.get("index")), call.get("source")
    rows, dim = call.of(tensor), call.dim(tensor)
    new = call.of(source) if isinstance(source, Tensor) and source.dim() else rows
    values = [rows, index, new]
    if not rows.apart:
        return call.other(Effect.ORDER, *values)
    beside = new.apart and new.place == rows.place
    if dim == rows.dim or index.kind is not Kind.SHARED or not beside:
        return rows._replace(cause=call.mixed(Effect.ORDER, *values))
    return rows._replace(cause=first_cause(values))


def taken(call: OpCall) -> Rows:
    """index_select: along one dimension, by an index of one."""
    tensor, index = call.args[0], call.of(call.get("index"))
    rows, dim = call.of(tensor), call.dim(tensor)
    if not rows.apart:
        return _from_shared(call, rows, index._replace(dim=dim))
    cause = first_cause([rows, index])
    if dim == rows.dim:
        if not (index.numbers and _one_row_each(call, tensor, rows)):
            cause = call.mixed(Effect.ORDER, rows, index)
    elif index.kind is not Kind.SHARED:
        cause = call.mixed(Effect.PAIRS, rows, index)
    return rows._replace(cause=cause)
