"""A chain of linear layers: the smallest model that a pipeline can cut anywhere."""

from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class MLPConfig:
    """Sizes of an MLP."""

    inputs: int = 32
    width: int = 64
    outputs: int = 16
    layers: int = 8  # linear layers, the last one included


class MLP(nn.Module):
    """x [batch, inputs] and y [batch, outputs] to the mean squared error."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        widths = [config.inputs, *[config.width] * (config.layers - 1)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(before, after), nn.GELU())
            for before, after in pairwise(widths)
        )
        self.head = nn.Linear(widths[-1], config.outputs)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x [batch, inputs], y [batch, outputs] -> the mean squared error, a scalar."""
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x), y)
