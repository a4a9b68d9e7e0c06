"""Which calls of a compiled function one step serves."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.modes import casts


def step_key(gm: fx.GraphModule, args: Sequence[Any]) -> Hashable:
    """Equal for calls that one step serves: same graph, shapes and modes."""
    shapes = tuple(
        (a.shape, _strides(a), a.dtype, a.device, a.requires_grad)
        if isinstance(a, Tensor)
        else repr(a)
        for a in args
    )
    ids = [id(a) for a in args if isinstance(a, Tensor)]
    same = tuple(map(ids.index, ids)) if len(set(ids)) < len(ids) else ()
    return gm.meta["text"], shapes, same, torch.is_grad_enabled(), tuple(casts())


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of an input; those of a parameter change when a rank gives it up."""
    return () if isinstance(tensor, torch.nn.Parameter) else tensor.stride()
