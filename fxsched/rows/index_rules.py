"""Rules for operations that pick values by index."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .compute_rules import beside
from .kinds import SHARED, UNKNOWN, Cause, Effect, Kind, OpCall, Rows


def embedded(call: OpCall) -> Rows:
    """embedding: rows of a table by index. Gradients may be divided by how often one
    is in the batch."""
    table, index = call.of(call.args[0]), call.of(call.args[1])
    if table.kind is not Kind.SHARED or not index.apart or index.numbers:
        return _reordered(call, index)
    counted = call.get("scale_grad_by_freq")
    return call.kept(index, Effect.STATISTICS if counted else None)


def picked(call: OpCall) -> Rows:
    """fxsched's own: what is computed of as many rows as values say."""
    return Rows(Kind.OTHER, cause=Cause(Effect.PICKED, "a selection", call.stack))


def by_sample(call: OpCall) -> Rows:
    """CTC: a loss for each sample, whose targets lie in rows, or one after another."""
    scores, *others = call.values
    apart = all(rows == Rows(Kind.APART) for rows in others)
    right = apart and scores.place == (1, 1) and call.args[1].dim() > 1
    return call.kept(Rows(Kind.APART), None if right else Effect.ORDER)


def _reordered(call: OpCall, index: Rows) -> Rows:
    """What an index picks of rows, in an order of its own."""
    rows = index._replace(numbers=False) if index.apart else Rows(Kind.OTHER)
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
    if not rows.apart and index.kind is Kind.SHARED:
        return rows
    if rows.kind is Kind.SHARED and picked.apart and not picked.numbers:
        return picked
    if not rows.apart:
        return _reordered(call, picked)
    if rows.dim in positions:
        alone = rows.outer == call.inner(tensor, rows) == 1  # a row at each place
        if alone and call.of(indices[rows.dim]).numbers:
            return picked._replace(numbers=rows.numbers, cause=None)
        return _reordered(call, picked)
    left = sum(d not in positions for d in range(rows.dim))
    before = rank if not adjacent or positions[0] < rows.dim else 0
    effect = None if index.kind is Kind.SHARED else Effect.PAIRS
    return call.kept(rows._replace(dim=left + before), effect)


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


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
        return UNKNOWN
    tensors = [i for i in indices if i is not None]
    if any(map(_is_mask, tensors)):
        mask = call.of(tensors[0])
        same = len(tensors) == 1 and mask.apart and values.dim() == 0
        return rows if same and mask.place == rows.place else UNKNOWN
    there, rank = indexed(call), max(i.dim() for i in tensors)
    count = values.dim() if isinstance(values, Tensor) else 0
    dim = there.dim - (tensor.dim() - len(tensors) + rank - count)
    effect = None
    if new.apart and new.place != (dim, there.outer):
        effect = Effect.PAIRS
    elif not new.apart and dim >= 0 and values.shape[dim] != 1:
        effect = Effect.ORDER  # as long as the batch and not of it: of all rows
    return call.kept(rows._replace(cause=there.cause), effect)


def gathered(call: OpCall) -> Rows:
    """gather and scatter: along one dimension, by an index of the same rank."""
    tensor, index = call.args[0], call.get("index")
    read = [each for each in call.tensors() if each.dim() == tensor.dim()]
    values = [call.of(each) for each in read]
    apart = [rows for rows in values if rows.apart]
    if not apart or any(rows.reduced for rows in values):
        return call.other(Effect.FUNCTION)
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
        return rows
    several = len({rows.place for rows in apart}) > 1
    effect = Effect.PAIRS if several else Effect.ORDER
    return call.kept(apart[0]._replace(numbers=False), effect)


def placed(call: OpCall) -> Rows:
    """index_add and its like: into places of one dimension, by an index of one."""
    tensor, values = call.args[0], call.get("source", call.get("value"))
    if not call.of(tensor).apart:
        return call.other(Effect.ORDER)
    indices = [None] * call.dim(tensor) + [call.get("index")]
    return written(call._replace(args=(tensor, indices, values)))


def taken(call: OpCall) -> Rows:
    """index_select: along one dimension, by an index of one."""
    tensor, index = call.args[0], call.get("index")
    return indexed(call._replace(args=(tensor, [None] * call.dim(tensor) + [index])))
