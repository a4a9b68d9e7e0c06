"""What shards call in the place of a model's operations, on their parts of values.

Of vocabularies (ranges of a table's rows, or of classes), experts (some of a stack's
matrices), and attention whose dropout stands by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


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


def grouped_part(
    product: Any, x: Tensor, weights: Tensor, ends: Tensor, first: int
) -> Tensor:
    """A grouped product with some neighbouring weights of all.

    product: its operation. x: [rows, k], in groups that end at `ends`. weights:
    [own, k, n], those of the groups from `first` on. Gives [rows, n].
    """
    start, end = _bounds(ends, first, len(weights))
    rows = torch.arange(len(x), device=x.device)
    mine = (rows < end - start).unsqueeze(1)
    # a group starts where the one before it ends, and the first with the first row;
    # what comes after the last group is made of memory as it is found
    moved = x[(rows + start) % len(x)].masked_fill(~mine, 0)
    own = ends[first : first + len(weights)] - start
    made: Tensor = product(moved, weights, offs=own)
    return made.masked_fill(~mine, 0)[(rows - start) % len(x)]


def picked_part(weights: Tensor, numbers: Tensor, first: int, total: int) -> Tensor:
    """weights[numbers], of `total` weights in all, with zeros for others than these,
    those from `first` on."""
    numbers = torch.where(numbers < 0, numbers + total, numbers)
    mine = _has(numbers, first, len(weights), total)
    picked = weights[torch.where(mine, numbers - first, 0)]
    return picked.masked_fill(~_along(mine, picked, 0), 0)


def of_groups(
    x: Tensor, ends: Tensor, dim: int, first: int, count: int, total: int
) -> Tensor:
    """x, along a dimension in groups that end at `ends`, with zeros for all but `count`
    of them."""
    start, end = _bounds(ends, first, count)
    rows = torch.arange(x.shape[dim], device=x.device)
    mine = (rows >= start) & (rows < end)
    return x.masked_fill(~_along(mine, x, dim), 0)


def of_picked(
    x: Tensor, numbers: Tensor, dim: int, first: int, count: int, total: int
) -> Tensor:
    """x, along a dimension made of weights that `numbers` pick, with zeros for all but
    `count` of these."""
    numbers = torch.where(numbers < 0, numbers + total, numbers)
    mine = _has(numbers, first, count, total)
    return x.masked_fill(~_along(mine, x, dim), 0)


def _bounds(ends: Tensor, first: int, count: int) -> tuple[Tensor | int, Tensor]:
    return (ends[first - 1] if first else 0), ends[first + count - 1]


def _has(numbers: Tensor, first: int, count: int, total: int) -> Tensor:
    """Which are of these `count`; what is beyond all is of the last ones, which have an
    error for it."""
    mine = numbers >= first
    return mine if first + count == total else mine & (numbers < first + count)


def _along(mine: Tensor, x: Tensor, dim: int) -> Tensor:
    return mine.view(*[1] * dim, -1, *[1] * (x.dim() - dim - 1))


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """What attention weighs values by, as torch computes it on the CPU.

    mask: added to the scores; of bools, those to keep.
    """
    cast = _autocast(query)
    query, key = _precise(query, cast), _precise(key, cast)
    factor = math.sqrt(abs(scale))
    with torch.autocast(query.device.type, enabled=False):
        scores = torch.matmul(
            query * math.copysign(factor, scale), key.transpose(-2, -1) * factor
        )
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(
                ~mask, -math.inf
            )
        elif mask is not None:
            mask = _cast(mask, cast)
        scores = scores if mask is None else scores + mask
        weights: Tensor = torch.ops.aten._safe_softmax(scores, -1)
    return weights


def attended(weights: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Values weighed, in the type that attention gives them in."""
    value = _precise(value, _autocast(value))
    with torch.autocast(value.device.type, enabled=False):
        return torch.matmul(weights, value).to(dtype)


def _autocast(value: Tensor) -> torch.dtype | None:
    """The type that autocast has attention in, if it is on."""
    kind = value.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _cast(value: Tensor, cast: torch.dtype | None) -> Tensor:
    leaves = cast is None or value.dtype is torch.float64
    return value if leaves else value.to(cast)


def _precise(value: Tensor, cast: torch.dtype | None) -> Tensor:
    """A value as attention reads it: of 16 bits, in 32."""
    value = _cast(value, cast)
    coarse = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    return value.float() if value.dtype in HALVES and not coarse else value
