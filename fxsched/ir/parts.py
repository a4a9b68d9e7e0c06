"""Parts of a weight that shards of stages read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """How a weight is cut: along a dimension that is outer x parts x something."""

    dim: int
    outer: int
    parts: int

    def of(self, whole: Tensor) -> list[Tensor]:
        """All parts."""
        return [self.part(whole, number) for number in range(self.parts)]

    def part(self, whole: Tensor, number: int) -> Tensor:
        """A part, contiguous: a view of the whole, where it is that."""
        blocks = torch.unflatten(whole, self.dim, (self.outer, self.parts, -1))
        mine = blocks.select(self.dim + 1, number)
        return mine.flatten(self.dim, self.dim + 1).contiguous()

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
    """How ranks have had a weight in parts since an earlier plan, which workers keep
    each part, and which one updates it, if u says."""

    cut: Cut
    owners: tuple[tuple[int, ...], ...]
    updaters: tuple[int | None, ...]

    def allows(self, other: KeptParts) -> bool:
        """Whether a plan may have the parts as the other says."""
        pairs = zip(self.updaters, other.updaters, strict=True)
        same = self[:2] == other[:2]
        return same and all(known in (None, its) for known, its in pairs)


def without_parts(
    positions: Iterable[int], parts: Mapping[int, PartOf]
) -> tuple[int, ...]:
    """Positions with those of weights in the place of those of their parts."""
    whole = (parts[i].input if i in parts else i for i in positions)
    return tuple(dict.fromkeys(whole))


def bytes_of_parts(
    sizes: Mapping[int, int], parts: Mapping[int, PartOf]
) -> dict[int, int]:
    """Bytes of what belongs to weights, by position, with those of their parts."""
    cut = {
        position: sizes[part.input] // part.cut.parts
        for position, part in parts.items()
        if part.input in sizes
    }
    return {**sizes, **cut}


def in_parts(positions: Sequence[int], parts: Mapping[int, PartOf]) -> tuple[int, ...]:
    """Positions of weights, with those of its parts in the place of each that is
    cut."""
    of: dict[int, list[int]] = {}
    for position, part in parts.items():
        of.setdefault(part.input, []).append(position)
    return tuple(each for i in positions for each in of.get(i, [i]))
