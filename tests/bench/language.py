"""The language model of `peers` and `memory`: models/gpt.py with a head of its own.

Output weights that are tied to the embedding would be in two stages at once, which
torch.distributed.pipelining can't do; so every contestant's are not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsched.models.gpt import GPT, GPTConfig

from .pipelining import Line

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setup:
    """What all contestants have in common. device: of this rank."""

    config: GPTConfig
    batch: int
    microbatches: int
    compiled: bool
    device: torch.device = CPU

    @staticmethod
    def of(options: argparse.Namespace) -> Setup:
        config = GPTConfig(
            options.vocabulary, options.length, options.width, layers=options.layers
        )
        return Setup(config, options.batch, options.microbatches, options.compiled)

    def model(self) -> GPT:
        """A new one, with the same weights every time and on every rank."""
        torch.manual_seed(0)
        model = GPT(self.config)
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return model.to(self.device)

    @cached_property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """tokens and targets [batch, length], the same on every rank."""
        made = torch.Generator().manual_seed(1)
        shape = (2, self.batch, self.config.length)
        drawn = torch.randint(self.config.vocabulary, shape, generator=made)
        tokens, targets = drawn.to(self.device)
        return tokens, targets

    def pieces(self) -> list[tuple[Tensor, ...]]:
        """The inputs of each microbatch."""
        chunks = (x.chunk(self.microbatches) for x in self.inputs)
        return list(zip(*chunks, strict=True))

    def gradients(self) -> dict[str, Tensor]:
        """Eager PyTorch's, in one process, by parameter."""
        model = self.model()
        for piece in self.pieces():
            (model(*piece) / self.microbatches).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def line(self) -> Line:
        """A new model as embedding, blocks and head."""
        model, (tokens, targets) = self.model(), self.inputs
        blocks = [Part(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
        parts = [Part("tokens", Opening(model)), *blocks, Part("norm", Ending(model))]
        return Line(model, parts, Stretch, {"tokens": tokens}, targets, loss)


class Part(NamedTuple):
    """A piece that isn't cut, by the name of the model's first module in it."""

    name: str
    module: nn.Module


class Opening(nn.Module):
    """The model up to its first block."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.tokens, self.positions = model.tokens, model.positions

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.tokens(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return out + self.positions(places)  # type: ignore[no-any-return]


class Ending(nn.Module):
    """The model after its last block, but for the loss."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x))
        return out


class Stretch(nn.Module):
    """A stage: takes the activation of the one before it; the first takes tokens."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.steps = nn.Sequential(*(part.module for part in parts))

    def forward(self, *carried: Tensor, tokens: Tensor) -> Tensor:
        (x,) = carried or (tokens,)
        out: Tensor = self.steps(x)
        return out


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))
