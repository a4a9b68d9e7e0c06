"""What a shard calls for its own experts: the rows that values give to other shards'
experts are zeros, so that the sum over all shards is the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
