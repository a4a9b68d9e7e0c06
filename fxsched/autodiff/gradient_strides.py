"""Values and gradients in the memory layout that they have in one process, after they
were sent.

What is sent is contiguous, and a product or a sum of a transposed value may round
otherwise than one of its copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Strides = tuple[int, ...]


def with_strides(value: Tensor, strides: Strides) -> Tensor:
    """The value, where memory is in the order of these strides; a stride of 0 repeats
    one element."""
    once = tuple(slice(0, 1 if stride == 0 else None) for stride in strides)
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    back = sorted(range(value.dim()), key=order.__getitem__)
    ordered = value[once].permute(order).contiguous()
    return ordered.permute(back).expand(value.shape)


def has_way_back(shape: Sequence[int], strides: Strides) -> bool:
    """Whether with_strides gives a value these strides: not if there are gaps in its
    memory, as in a part of a tensor."""
    again = with_strides(torch.empty(shape, device="meta"), strides).stride()
    sizes = zip(shape, again, strides, strict=True)
    return all(size == 1 or one == other for size, one, other in sizes)


def repeats(strides: Strides) -> bool:
    """Whether what memory has of a value is in the order of its dimensions."""
    kept = [stride for stride in strides if stride]
    return kept == sorted(kept, reverse=True)


class _Restrided(torch.autograd.Function):
    """Gives a value and its gradient these strides; None: those they come with."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, there: Strides | None, back: Strides | None
    ) -> Tensor:
        ctx.strides = back
        return value.clone() if there is None else with_strides(value, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        back: Strides | None = ctx.strides
        given = gradient if back is None else with_strides(gradient, back)
        return given, None, None


def restrided(
    value: Tensor, there: Strides | None = None, back: Strides | None = None
) -> Tensor:
    """A copy of the value in strides `there`, whose gradient goes back in strides
    `back`; None: in those that it comes with."""
    restride: Any = _Restrided.apply
    result: Tensor = restride(value, there, back)
    return result
