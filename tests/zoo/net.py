"""The model that features are shown on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .case import BATCH

WIDTH = 16


class Net(nn.Module):
    """Two halves, and the mean square of what comes out; rows change `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.two = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))

    def hidden(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.one(x))
        return out

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return (self.hidden(x) - y).pow(2).mean()


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    size = (BATCH, *(shape or (WIDTH,)))
    return torch.randn(size), torch.randn(size)
