"""Do a picture, a text and a sound belong together? Three encoders that share nothing,
so that each can run on a worker of its own, and a trunk that reads all three."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Block


@dataclass(frozen=True)
class ThreeEncoderConfig:
    """Sizes of a ThreeEncoder, and of what it reads."""

    image_height: int = 32  # height and width must divide by patch
    image_width: int = 64
    patch: int = 8  # height and width of a patch
    vocabulary: int = 4096
    text_length: int = 24
    audio_frames: int = 32
    audio_bins: int = 33
    width: int = 64
    heads: int = 4
    image_layers: int = 3
    text_layers: int = 4
    audio_layers: int = 3
    trunk_layers: int = 1


class Patches(nn.Module):
    """Cuts a grey picture into squares, one token each, row by row."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(1, width, patch, stride=patch)

    def forward(self, image: Tensor) -> Tensor:
        """image [batch, 1, height, width] -> [batch, patches, channels]."""
        x: Tensor = self.project(image)
        return x.flatten(2).transpose(1, 2)


class Encoder(nn.Module):
    """Embeds its input as tokens, adds their positions, and lets them attend."""

    def __init__(
        self, embed: nn.Module, length: int, width: int, heads: int, layers: int
    ) -> None:
        super().__init__()
        self.embed = embed
        self.positions = nn.Embedding(length, width)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """x as embed takes it, keep [batch, n] -> [batch, n, width]."""
        x = self.embed(x)
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x, keep)
        out: Tensor = self.norm(x)
        return out


class ThreeEncoder(nn.Module):
    """Pictures, texts and sounds to logits, or with labels to their mean loss."""

    def __init__(self, config: ThreeEncoderConfig) -> None:
        super().__init__()
        c = config
        patches = (c.image_height // c.patch) * (c.image_width // c.patch)
        image = Patches(c.patch, c.width)
        text = nn.Embedding(c.vocabulary, c.width)
        nn.init.normal_(text.weight, std=0.1)  # about as loud as the other two
        audio = nn.Linear(c.audio_bins, c.width)
        self.image = Encoder(image, patches, c.width, c.heads, c.image_layers)
        self.text = Encoder(text, c.text_length, c.width, c.heads, c.text_layers)
        self.audio = Encoder(audio, c.audio_frames, c.width, c.heads, c.audio_layers)
        self.trunk = nn.ModuleList(
            Block(c.width, c.heads) for _ in range(c.trunk_layers)
        )
        self.norm = nn.LayerNorm(c.width)
        self.head = nn.Sequential(
            nn.Linear(6 * c.width, c.width), nn.GELU(), nn.Linear(c.width, 1)
        )

    def forward(
        self, image: Tensor, text: Tensor, audio: Tensor, label: Tensor | None = None
    ) -> Tensor:
        """image [batch, 1, height, width], text [batch, n] int64 (0 is padding),
        audio [batch, frames, bins] -> logits [batch].

        With label [batch] (1.0: they belong together, 0.0: one is another's), the mean
        binary cross entropy instead, a scalar.
        """
        words = text != 0
        parts = self.image(image), self.text(text, words), self.audio(audio)
        sizes = [part.shape[1] for part in parts]
        keep = F.pad(words, (sizes[0], sizes[2]), value=True)
        x = torch.cat(parts, 1)
        for block in self.trunk:
            x = block(x, keep)
        i, t, a = self.norm(x).split(sizes, 1)
        i, t, a = i.mean(1), average(t, words), a.mean(1)
        each_and_pairs = torch.cat([i, t, a, i * t, i * a, t * a], -1)
        logits: Tensor = self.head(each_and_pairs).flatten(0)
        if label is None:
            return logits
        return F.binary_cross_entropy_with_logits(logits, label)


def average(x: Tensor, keep: Tensor) -> Tensor:
    """x [batch, n, width], keep [batch, n] (False: padding) -> [batch, width]."""
    weight = keep.to(x.dtype)[..., None]
    return (x * weight).sum(1) / weight.sum(1).clamp(min=1.0)
