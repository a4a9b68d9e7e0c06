"""Chains and trees of blocks that sleep: workers that need no cores.

A tree has branches of equal length, each with an input of its own, and a head, which
reads the sum of what they make; a chain is a tree with one branch and no head.
"""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx
import torch
from torch import Tensor, nn

from . import towers  # noqa: F401  # defines bench::work

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
        out: Tensor = torch.ops.bench.work(x * self.scale, self.seconds)
        return out


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


def graph(model: Tree, stages: int) -> nx.DiGraph[int]:
    """The stages, each of as many blocks as the others, and which reads which."""
    size = len(model.blocks) // stages
    found: nx.DiGraph[int] = nx.DiGraph()
    found.add_nodes_from(range(stages))
    for i, reads in enumerate(model.reads()):
        found.add_edges_from(
            (j // size, i // size) for j in reads if j // size < i // size
        )
    return found


class Stretch(nn.Module):
    """A stage of the tree as a line: takes the tensors on their way, gives those after.

    Every rank has the batch, so that of branches only what blocks made is carried.
    """

    def __init__(self, model: Tree, blocks: range) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(model.blocks[i] for i in blocks)
        reads = list(model.reads())
        self.reads = [len(reads[i]) for i in blocks]
        self.branch = [i // model.length for i in blocks]

    def forward(
        self, *carried: Tensor, **inputs: Tensor
    ) -> tuple[Tensor, ...] | Tensor:
        tensors = list(carried)
        for block, reads, branch in zip(
            self.blocks, self.reads, self.branch, strict=True
        ):
            if reads:
                given, tensors = tensors[-reads:], tensors[:-reads]
            else:
                given = [inputs[f"x{branch}"]]
            tensors.append(block(*given))
        return tensors[0] if len(tensors) == 1 else tuple(tensors)
