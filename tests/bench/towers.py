"""A two-tower model for benchmarks, and the same modules as one line for pipelines.

Two towers read a sample's two token sequences, a head reads the sum of what they make:

    a: embed, blocks --\\
                        + -- blocks, out        the graph
    b: embed, blocks --/

    a's embed, a's blocks, b's embed, b's blocks, +, blocks, out        the line

With `sleep` a block sleeps instead of computing, so that more workers than there are
cores run as if each had its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsched.models.layers import Block

from .naps import nap


@dataclass(frozen=True)
class Sizes:
    width: int
    length: int  # of both token sequences
    batch: int
    vocabulary: int = 4096
    heads: int = 4
    layers: tuple[int, int, int] = (3, 3, 2)  # blocks of tower a, tower b and the head
    sleep: float = 0.0  # seconds of a block's F over the whole batch; 0 computes


class Sleeper(nn.Module):
    """Takes a block's place: a trivial parameter, and a sleep."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + torch.randn(width) / 8)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return nap(x * self.scale, self.seconds)


class Embed(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.randn(sizes.length, sizes.width) / 50)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, length] -> [batch, length, width]."""
        out: Tensor = self.tokens(tokens) + self.positions
        return out


class Out(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, length, width] -> [batch]."""
        out: Tensor = self.linear(self.norm(x).mean(1)).flatten(0)
        return out


class Join(nn.Module):
    """A module, so that a stage can start here; else b's adds, and waits for a."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class TwoTowers(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()

        def blocks(count: int) -> nn.Sequential:
            each = sizes.sleep / sizes.batch
            return nn.Sequential(
                *(
                    Sleeper(sizes.width, each)
                    if sizes.sleep
                    else Block(sizes.width, sizes.heads)
                    for _ in range(count)
                )
            )

        self.embed_a, self.embed_b = Embed(sizes), Embed(sizes)
        self.a, self.b, self.head = map(blocks, sizes.layers)
        self.join, self.out = Join(), Out(sizes.width)

    def forward(self, a: Tensor, b: Tensor, target: Tensor) -> Tensor:
        """a, b [batch, length] int64, target [batch] -> the mean squared error."""
        x = self.join(self.a(self.embed_a(a)), self.b(self.embed_b(b)))
        return F.mse_loss(self.out(self.head(x)), target)


def sample(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """A batch: two token sequences a sample, and its target."""
    a, b = torch.randint(sizes.vocabulary, (2, sizes.batch, sizes.length))
    return a, b, torch.randn(sizes.batch)


class Attend(nn.Module):
    """The first half of a block: its modules, not copies."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm, self.attention = block.attention_norm, block.attention

    def forward(self, x: Tensor) -> Tensor:
        a = self.norm(x)
        return x + self.attention(a, a)  # type: ignore[no-any-return]


class Feed(nn.Module):
    """The second half of a block."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm, self.feed = block.feed_norm, block.feed

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(self.norm(x))  # type: ignore[no-any-return]


class Part(NamedTuple):
    """A piece of the line that isn't cut; its module does `does` to the tensors."""

    name: str
    does: str  # "read a", "read b", "join" or "continue", maybe with inputs too
    module: nn.Module


def line(model: TwoTowers) -> list[Part]:
    """The model's own modules, one after the other."""

    def blocks(name: str) -> Iterator[Part]:
        for i, block in enumerate(model.get_submodule(name).children()):
            if isinstance(block, Block):
                yield Part(f"{name}{i}.attend", "continue", Attend(block))
                yield Part(f"{name}{i}.feed", "continue", Feed(block))
            else:
                yield Part(f"{name}{i}", "continue", block)

    return [
        Part("embed_a", "read a", model.embed_a),
        *blocks("a"),
        Part("embed_b", "read b", model.embed_b),
        *blocks("b"),
        Part("join", "join", model.join),
        *blocks("head"),
        Part("out", "continue", model.out),
    ]


class Stretch(nn.Module):
    """A stage of the line: takes the tensors on their way, gives those after it.

    The model's inputs come by keyword; a part that `does` "read a" gets input a, one
    that does "continue a" gets the last tensor and input a.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(part.module for part in parts)
        self.does = [part.does.split() for part in parts]

    def forward(self, *carried: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        tensors = list(carried)
        for (does, *names), step in zip(self.does, self.steps, strict=True):
            read = [inputs[name] for name in names]
            if does == "read":
                tensors.append(step(*read))
            elif does == "join":
                tensors = [step(*tensors, *read)]
            else:
                tensors[-1] = step(tensors[-1], *read)
        return tuple(tensors)
