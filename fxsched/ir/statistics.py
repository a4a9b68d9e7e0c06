"""Running statistics of BatchNorm and InstanceNorm, as what a batch moves them to."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(state: Tensor, new: Tensor, momentum: float) -> Tensor:
    """A running statistic [channels], moved towards that of a batch."""
    with torch.no_grad():
        return state.mul(1 - momentum).add(new.flatten(), alpha=momentum)


def unbiased(var: Tensor, numbers: int) -> Tensor:
    """A variance that is kept, of one [channels, ..] over all numbers of a batch."""
    each = numbers // var.numel()
    return var * (each / max(each - 1, 1))


def moved_mean(mean: Tensor, x: Tensor, momentum: float) -> Tensor:
    """A running mean [channels], moved towards that of means of instances.

    x: [batch, channels, ..].
    """
    return moved(mean, x.detach().flatten(2).mean(2).mean(0), momentum)


def moved_var(var: Tensor, x: Tensor, momentum: float) -> Tensor:
    """The same of their unbiased variances."""
    return moved(var, x.detach().flatten(2).var(2).mean(0), momentum)
