"""Parts of a weight that shards of stages read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """How a weight is cut: along a dimension that is outer x parts x something."""

    dim: int
    outer: int
    parts: int

    def of(self, whole: Tensor) -> list[Tensor]:
        """All parts, each contiguous: views of the whole, where these are that."""
        blocks = torch.unflatten(whole, self.dim, (self.outer, self.parts, -1))
        parts = (b.flatten(self.dim, self.dim + 1) for b in blocks.unbind(self.dim + 1))
        return [part.contiguous() for part in parts]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole of all parts."""
        sizes = (self.outer, -1)
        blocks = [torch.unflatten(part, self.dim, sizes) for part in parts]
        return torch.cat(blocks, self.dim + 1).flatten(self.dim, self.dim + 1)


class PartOf(NamedTuple):
    """A part of the weight at a position of a call, by its number."""

    input: int
    cut: Cut
    number: int


class WeightCut(NamedTuple):
    """What is said of a weight of several dimensions: its name and shape, whether it is
    cut by "column", "row" or "expert" or stays "whole", and why it does; how many parts
    it has.
    """

    name: str
    shape: tuple[int, ...]
    word: str
    why: str = ""
    parts: int = 1


class KeptParts(NamedTuple):
    """How ranks have had a weight in parts since an earlier plan, and which workers
    keep each part."""

    cut: Cut
    owners: tuple[tuple[int, ...], ...]
