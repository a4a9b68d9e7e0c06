"""What a shard computes of its range of a vocabulary, and what all shards' come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..rows.kinds import Kind
from .layouts import Each, Follower, Layouts, Operation, value_of
from .local_calls import LocalCall
from .vocabulary_rules import ClassLoss, Lookup, lookup_of, loss_of, vocabulary_layout


def embedding_part(
    indices: Tensor,
    weight: Tensor,
    padding_idx: int | None,
    shards: int,
    shard: int,
) -> Tensor:
    """The rows of a table at `indices`, where a shard has them, and zeros elsewhere:
    the sum over all shards is the embedding.

    weight: rows shard * n to (shard + 1) * n of the table, n = len(weight).
    padding_idx: of the table, the row that gets no gradient.
    Raises what torch does for indices out of the table, on the first or last shard.
    """
    size = int(weight.shape[0])
    local = indices - shard * size
    outside = torch.zeros_like(local, dtype=torch.bool)
    if shard > 0:
        outside = outside | (local < 0)
    if shard < shards - 1:
        outside = outside | (local >= size)
    padding = None
    if padding_idx is not None and padding_idx // size == shard:
        padding = padding_idx - shard * size
    rows = F.embedding(local.masked_fill(outside, 0), weight, padding)
    return rows.masked_fill(outside.unsqueeze(-1), 0)


def cross_entropy_part(
    logits: Tensor, labels: Tensor, weight: Tensor | None, smooth: bool, shard: int
) -> Tensor:
    """Of each row: the largest of a shard's logits, the sum of exp(logit - largest),
    and the label's logit, if the shard has it, else another one.

    logits: [rows, n, ..], classes shard * n to (shard + 1) * n; labels: [rows, ..].
    smooth: whether the sum of all logits, times weights if there are some, is a fourth.
    Returns [3 or 4, rows, ..] in float32, or float64 for logits that are.
    """
    size = int(logits.shape[1])
    local = (labels - shard * size).clamp(0, size - 1)
    mine = logits.gather(1, local.unsqueeze(1)).squeeze(1)
    numbers = logits if logits.dtype is torch.float64 else logits.float()
    largest = numbers.detach().amax(1)
    # where all are -inf, a difference would be NaN
    largest = largest.masked_fill(largest == -torch.inf, 0)
    total = (numbers - largest.unsqueeze(1)).exp().sum(1)
    found = [largest, total, mine.to(numbers.dtype)]
    if smooth and weight is None:
        found.append(numbers.sum(1))
    elif smooth and weight is not None:
        part = weight[shard * size : (shard + 1) * size].to(numbers.dtype)
        found.append(torch.tensordot(numbers, part, ([1], [0])))
    return torch.stack(found)


def cross_entropy_of_parts(
    parts: Sequence[Tensor],
    labels: Tensor,
    weight: Tensor | None,
    size: int,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    dtype: torch.dtype,
) -> Tensor:
    """What F.cross_entropy gives, of what cross_entropy_part gave on each shard.

    size: classes of a shard. Raises what torch.gather does for labels out of range.
    """
    stats = torch.stack(list(parts))  # [shards, 3 or 4, rows, ..]
    ignored = labels == ignore_index
    labels = labels.masked_fill(ignored, 0)
    owner = torch.div(labels, size, rounding_mode="floor").unsqueeze(0)
    largest = stats[:, 0].detach()
    most = largest.amax(0)
    total = (stats[:, 1] * (largest - most).exp()).sum(0).log()
    loss = total - (stats[:, 2].gather(0, owner).squeeze(0) - most)
    scales = torch.ones_like(loss) if weight is None else weight[labels].to(loss.dtype)
    loss = loss * scales
    if label_smoothing:
        classes = size * len(parts)
        every = classes if weight is None else weight.sum().to(loss.dtype)
        smooth = (total + most) * every - stats[:, 3].sum(0)
        loss = (1 - label_smoothing) * loss + label_smoothing / classes * smooth
    loss = loss.masked_fill(ignored, 0)
    if reduction == "mean":
        loss = loss.sum() / scales.masked_fill(ignored, 0).sum()
    elif reduction == "sum":
        loss = loss.sum()
    return loss.to(dtype)


def vocabulary_call(
    follower: Follower,
    call: Operation,
    known: Layouts,
    parts: Mapping[fx.Node, Any],
) -> LocalCall | None:
    """The call on a shard's range of a vocabulary; None where shards call what the
    model does.

    known: how operands are laid out, `parts` what they are then.
    """
    layout = vocabulary_layout(call, known)
    if layout is None or layout[0].kind is not Kind.SUM:
        return None
    lookup, loss = lookup_of(call), loss_of(call)
    if lookup is not None:
        local = _lookup(lookup, follower.shards)
    else:
        assert loss is not None, "no other call has such a layout"
        local = _loss(loss, call, follower.shards)
    operation = local.on_shard(call, 0)
    given = fx.map_arg(
        (operation.args, operation.kwargs), lambda n: parts.get(n, value_of(n))
    )
    with torch.no_grad():
        return local._replace(value=follower.run(operation, *given))


def _lookup(lookup: Lookup, shards: int) -> LocalCall:
    args = (lookup.indices, lookup.weight, lookup.padding_idx, shards)
    shard = {"shard": Each(tuple(range(shards)))}
    return LocalCall(args, shard, {}, None, embedding_part)


def _loss(loss: ClassLoss, call: Operation, shards: int) -> LocalCall:
    args = (loss.logits, loss.labels, loss.weight, loss.label_smoothing > 0)
    settings = {
        "size": int(value_of(loss.logits).shape[1]) // shards,
        "reduction": loss.reduction,
        "ignore_index": loss.ignore_index,
        "label_smoothing": loss.label_smoothing,
        "dtype": call.value.dtype,
    }
    read = (loss.labels, loss.weight)
    join = Operation(
        "call_function", cross_entropy_of_parts, read, settings, call.value
    )
    shard = {"shard": Each(tuple(range(shards)))}
    return LocalCall(args, shard, {}, None, cross_entropy_part, join)
