"""What a GradScaler finds out about gradients, with what other ranks found.

The scaler has no hook between looking at gradients and skipping a step. Both unscale_()
and step(), which of fused optimizers doesn't call that, end in _unscale_grads_.

Tried with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from .patched import replace_once

Found = dict[torch.device, Tensor]  # 1 where a gradient overflowed, by device


def after_unscaling(
    concerns: Callable[[Optimizer], bool],
    change: Callable[[GradScaler, Found, Tensor], Found],
) -> None:
    """Gives the scaler change(scaler, found, 0), for optimizers that this concerns."""

    def unscale(
        real: Any, scaler: Any, optimizer: Any, inverse: Any, found: Tensor, *rest: Any
    ) -> Any:
        here: Found = real(scaler, optimizer, inverse, found, *rest)
        return change(scaler, here, found) if concerns(optimizer) else here

    replace_once((GradScaler,), "_unscale_grads_", unscale)
