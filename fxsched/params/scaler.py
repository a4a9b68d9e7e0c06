"""A GradScaler learns of gradients that overflowed on other ranks."""

from __future__ import annotations

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..torch_compat.scalers import Found, after_unscaling
from ..transport.processes import everyone
from ..transport.world import are_ranks
from .optimizers import parameters_of
from .record import are_placed


def share_overflows() -> None:
    """From now on GradScalers check gradients of a model on all ranks that have it
    between them, so that all skip the same steps and keep the same scale.

    A rank alone would step where another skips, and one that updates nothing has
    nothing to check, which a GradScaler takes for a mistake. Every rank then calls
    unscale_(), or step() without it, alike, as it calls the model. PlanError if their
    scales differ; TimeoutError where another rank doesn't call it.
    """

    def is_spread(optimizer: Optimizer) -> bool:
        return are_placed(parameters_of(optimizer)) and are_ranks()

    after_unscaling(is_spread, _of_all_ranks)


def _of_all_ranks(scaler: GradScaler, here: Found, found: Tensor) -> Found:
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
