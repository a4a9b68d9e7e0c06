"""Eight models to plan: several encoders, skips and branches, on the meta device.

Each has some ten to thirty blocks, and costs that no number of stages divides evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsched.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from fxsched.models.layers import Block, CrossBlock
from fxsched.models.three_encoder import Encoder, ThreeEncoder, ThreeEncoderConfig
from fxsched.models.unet import UNet, UNetConfig

ROWS = 32  # of a batch


class Asked(NamedTuple):
    """A model with the arguments of a call."""

    model: nn.Module
    args: tuple[Tensor, ...]


class Patches(nn.Module):
    """Pictures [batch, 3, n, n] to tokens [batch, patches, width]."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, patch, stride=patch)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.project(image)
        return out.flatten(2).transpose(1, 2)


class Clip(nn.Module):
    """Pictures and texts, whose rows meet in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.image = Encoder(Patches(16, 192), 196, 192, 6, 10)
        self.text = Encoder(nn.Embedding(4096, 128), 77, 128, 4, 8)
        self.image_head, self.text_head = nn.Linear(192, 128), nn.Linear(128, 128)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        i = F.normalize(self.image_head(self.image(image).mean(1)), dim=-1)
        t = F.normalize(self.text_head(self.text(text).mean(1)), dim=-1)
        logits = 10 * i @ t.T
        own = torch.arange(len(logits), device=logits.device)
        return F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)


class Llava(nn.Module):
    """An image encoder, a projector, and a language model that reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.image = Encoder(Patches(16, 128), 196, 128, 4, 7)
        self.project = nn.Sequential(
            nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 192)
        )
        self.words = nn.Embedding(2048, 192)
        self.blocks = nn.ModuleList(Block(192, 6, causal=True) for _ in range(9))
        self.head = nn.Linear(192, 2048)

    def forward(self, image: Tensor, text: Tensor, target: Tensor) -> Tensor:
        x = torch.cat([self.project(self.image(image)), self.words(text)], 1)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x[:, -text.shape[1] :])
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Whisper(nn.Module):
    """A long sound is encoded, and a short text decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, 160, 3, padding=1)
        self.second = nn.Conv1d(160, 160, 3, stride=2, padding=1)
        self.encoder = nn.ModuleList(Block(160, 4) for _ in range(7))
        self.words = nn.Embedding(4096, 160)
        self.decoder = nn.ModuleList(CrossBlock(160, 4) for _ in range(7))
        self.head = nn.Linear(160, 4096)

    def forward(self, sound: Tensor, text: Tensor, target: Tensor) -> Tensor:
        memory = F.gelu(self.second(F.gelu(self.first(sound)))).transpose(1, 2)
        for block in self.encoder:
            memory = block(memory)
        x = self.words(text)
        for block in self.decoder:
            x = block(x, memory)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Diamonds(nn.Module):
    """Branches of unequal length, again and again, whose sums the next ones read."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.ModuleList() for _ in range(5))
        for i, left in enumerate(self.left):
            left.extend(Block(128, 4) for _ in range(1 + i % 3))
        self.right = nn.ModuleList(Block(128, 4) for _ in range(5))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for left, right in zip(self.left, self.right, strict=True):
            y = x
            for block in left:
                y = block(y)
            x = y + right(x)
        return F.mse_loss(x, target)


def _words(rows: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (rows, length))


def _clip() -> Asked:
    inputs = torch.randn(ROWS, 3, 224, 224), _words(ROWS, 77, 4096)
    return Asked(Clip(), inputs)


def _three() -> Asked:
    config = ThreeEncoderConfig(
        width=128, image_layers=5, text_layers=6, audio_layers=4, trunk_layers=4
    )
    inputs = (
        torch.randn(ROWS, 1, 32, 64),
        _words(ROWS, 24, 4096),
        torch.randn(ROWS, 32, 33),
        torch.ones(ROWS),
    )
    return Asked(ThreeEncoder(config), inputs)


def _heavy() -> Asked:
    """One encoder with about eight times the work of each of the others."""
    config = ThreeEncoderConfig(
        image_height=64,
        image_width=128,
        width=128,
        image_layers=12,
        text_layers=8,
        audio_layers=6,
        trunk_layers=1,
    )
    inputs = (
        torch.randn(ROWS, 1, 64, 128),
        _words(ROWS, 24, 4096),
        torch.randn(ROWS, 32, 33),
        torch.ones(ROWS),
    )
    return Asked(ThreeEncoder(config), inputs)


def _llava() -> Asked:
    inputs = (
        torch.randn(ROWS, 3, 224, 224),
        _words(ROWS, 60, 2048),
        _words(ROWS, 60, 2048),
    )
    return Asked(Llava(), inputs)


def _whisper() -> Asked:
    inputs = (
        torch.randn(ROWS, 80, 600),
        _words(ROWS, 48, 4096),
        _words(ROWS, 48, 4096),
    )
    return Asked(Whisper(), inputs)


def _t5() -> Asked:
    config = EncoderDecoderConfig(
        2048, 2048, 128, width=160, encoder_layers=7, decoder_layers=7
    )
    inputs = _words(ROWS, 128, 2048), _words(ROWS, 96, 2048), _words(ROWS, 96, 2048)
    return Asked(EncoderDecoder(config), inputs)


def _unet() -> Asked:
    inputs = torch.randn(ROWS, 3, 64, 64), torch.randn(ROWS, 3, 64, 64)
    return Asked(UNet(UNetConfig(width=32, levels=5)), inputs)


def _diamonds() -> Asked:
    return Asked(Diamonds(), (torch.randn(ROWS, 96, 128), torch.randn(ROWS, 96, 128)))


MODELS: dict[str, Callable[[], Asked]] = {
    "clip": _clip,
    "three": _three,
    "heavy": _heavy,
    "llava": _llava,
    "whisper": _whisper,
    "t5": _t5,
    "unet": _unet,
    "diamonds": _diamonds,
}


def asked(name: str) -> Asked:
    """A model on the meta device, by name."""
    with torch.device("meta"):
        return MODELS[name]()
