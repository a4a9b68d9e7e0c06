"""Chains and trees of blocks that sleep: workers that need no cores.

A tree has branches of equal length, each with an input of its own, and a head, which
reads the sum of what they make; a chain is a tree with one branch and no head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .naps import nap

WIDTH = 8  # of what blocks pass on


class Block(nn.Module):
    """A sum, a parameter, and a sleep: so many seconds for a row in F, twice in B."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + torch.randn(WIDTH) / 8)
        self.seconds = seconds

    def forward(self, *inputs: Tensor) -> Tensor:
        x = inputs[0]
        for other in inputs[1:]:
            x = x + other
        return nap(x * self.scale, self.seconds)


class Tree(nn.Module):
    """blocks: in the order of data flow, one branch after the other, then the head.

    seconds: of each block's F, for one row.
    """

    def __init__(self, branches: int, length: int, head: int, seconds: float) -> None:
        super().__init__()
        self.branches, self.length = branches, length
        count = branches * length + head
        self.blocks = nn.ModuleList(Block(seconds) for _ in range(count))

    def reads(self) -> Iterator[tuple[int, ...]]:
        """For each block the blocks that it reads; none for the first of a branch."""
        ends = range(self.length - 1, self.branches * self.length, self.length)
        for i in range(len(self.blocks)):
            if i == self.branches * self.length:
                yield tuple(ends)
            elif i < self.branches * self.length and i % self.length == 0:
                yield ()
            else:
                yield (i - 1,)

    def forward(self, *inputs: Tensor) -> Tensor:
        """inputs: [batch, WIDTH] for each branch -> the mean over the batch."""
        made: list[Tensor] = []
        given = iter(inputs)
        for block, reads in zip(self.blocks, self.reads(), strict=True):
            made.append(block(*([made[i] for i in reads] or [next(given)])))
        return loss(made[-1])


def loss(out: Tensor) -> Tensor:
    return out.sum(1).mean()


class Stretch(nn.Module):
    """A block of the tree made a line: takes the tensors on their way, gives those
    after it.

    Every rank has the batch, so that of branches only what blocks made is carried.
    """

    def __init__(self, model: Tree, number: int) -> None:
        super().__init__()
        self.block = model.blocks[number]
        self.reads = len(list(model.reads())[number])
        self.branch = number // model.length

    def forward(
        self, *carried: Tensor, **inputs: Tensor
    ) -> tuple[Tensor, ...] | Tensor:
        """carried: the ends of the branches so far; inputs: x0 of the first, .."""
        if not self.reads:
            return *carried, self.block(inputs[f"x{self.branch}"])
        made: Tensor = self.block(*carried[-self.reads :])
        rest = carried[: -self.reads]
        return (*rest, made) if rest else made
