"""A small denoising U-Net: what each level makes on the way down, the same level
reads again on the way up."""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class UNetConfig:
    """Sizes of a UNet."""

    channels: int = 3
    width: int = 16  # channels of the first level; doubles at each level down
    levels: int = 3  # height and width must divide by 2 ** (levels - 1)
    groups: int = 4


class ConvBlock(nn.Sequential):
    """Two rounds of convolution, GroupNorm (per sample, so batches split), GELU."""

    def __init__(self, before: int, after: int, groups: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(groups, after),
            nn.GELU(),
            nn.Conv2d(after, after, 3, padding=1),
            nn.GroupNorm(groups, after),
            nn.GELU(),
        )


class UNet(nn.Module):
    """Noisy and clean pictures to the mean squared error."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        widths = [config.width * 2**level for level in range(config.levels)]
        steps = list(pairwise(widths))
        self.first = ConvBlock(config.channels, widths[0], config.groups)
        self.down = nn.ModuleList(ConvBlock(a, b, config.groups) for a, b in steps)
        self.up = nn.ModuleList(
            ConvBlock(a + b, a, config.groups) for a, b in reversed(steps)
        )
        self.last = nn.Conv2d(widths[0], config.channels, 1)

    def forward(self, noisy: Tensor, clean: Tensor) -> Tensor:
        """noisy, clean [batch, channels, height, width] -> the mean squared error."""
        x = self.first(noisy)
        skips: list[Tensor] = []
        for block in self.down:
            skips.append(x)
            x = block(F.avg_pool2d(x, 2))
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1))
        return F.mse_loss(self.last(x), clean)
