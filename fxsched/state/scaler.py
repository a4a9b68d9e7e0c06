"""A GradScaler learns of gradients that overflowed on other ranks."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..transport.processes import everyone
from ..transport.world import are_ranks
from .optimizers import parameters_of
from .ownership import OWNERSHIPS


def guard_scalers() -> None:
    """From now on GradScalers check gradients of a model on all ranks that have it
    between them, so that all skip the same steps and keep the same scale.

    A rank alone would step where another skips, and one that updates nothing has
    nothing to check, which a GradScaler takes for a mistake. Every rank then calls
    unscale_(), or step() without it, alike, as it calls the model. PlanError if their
    scales differ; TimeoutError where another rank doesn't call it.
    """
    scalers: Any = GradScaler
    real = scalers._unscale_grads_
    if hasattr(real, "guarded"):
        return

    # behind unscale_() and behind step() of fused optimizers, which don't call that
    @wraps(real)
    def guarded(
        scaler: GradScaler,
        optimizer: Optimizer,
        inverse: Tensor,
        found: Tensor,
        *rest: Any,
    ) -> dict[torch.device, Tensor]:
        here: dict[torch.device, Tensor] = real(
            scaler, optimizer, inverse, found, *rest
        )
        spread = any(p in OWNERSHIPS for p in parameters_of(optimizer))
        if not (are_ranks() and spread):
            return here
        overflowed = any(bool(each) for each in here.values())
        call = f"GradScaler.step or unscale_, with scale {scaler.get_scale():g}"
        ranks = everyone("GradScaler").agree(call, (bool(here), overflowed))
        checked, infinite = (any(each) for each in zip(*ranks, strict=True))
        if not checked:
            return here  # no rank has gradients: torch's error
        here = here or {found.device: found}
        for each in here.values():
            each.fill_(infinite)
        return here

    guarded.guarded = True  # type: ignore[attr-defined]
    scalers._unscale_grads_ = guarded
