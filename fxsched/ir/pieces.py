"""A bundle of tensors in equal pieces, each of which another worker adds up.

A piece is a tuple of 1-d tensors: a run of the elements of all tensors, one tensor
after the other, each in the order in which its memory has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

Specs = tuple[Any, ...]  # as in graphs, which imports this file
Layout = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def layout_of(specs: Specs) -> Layout:
    """By tensor, its dimensions from the one with the largest stride to the one with
    the smallest, and its shape in this order."""
    found = []
    for spec in specs:
        dims = range(len(spec.shape))
        order = sorted(dims, key=lambda dim: -spec.stride[dim])
        found.append((tuple(order), tuple(spec.shape[dim] for dim in order)))
    return tuple(found)


def _runs(number: int, count: int, layout: Layout) -> Iterator[tuple[int, int, int]]:
    """The tensors of a piece: which, and its first element and how many."""
    sizes = [prod(shape) for _, shape in layout]
    first, last = (sum(sizes) * i // count for i in (number, number + 1))
    for i, size in enumerate(sizes):
        begin, end = max(first, 0), min(last, size)
        if begin < end:
            yield i, begin, end - begin
        first, last = first - size, last - size


def piece_specs(number: int, count: int, specs: Specs) -> Specs:
    """The shapes of a piece."""
    return tuple(
        specs[i].run(size) for i, _, size in _runs(number, count, layout_of(specs))
    )


def piece(
    number: int, count: int, layout: Layout, values: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Piece `number` of `count` of a bundle: views of the bundle where possible."""
    return tuple(
        values[i].permute(layout[i][0]).reshape(-1).narrow(0, first, size)
        for i, first, size in _runs(number, count, layout)
    )


def join(layout: Layout, *pieces: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Joins all pieces of a bundle, in order, into a bundle in new memory."""
    runs: list[list[Tensor]] = [[] for _ in layout]
    for number, each in enumerate(pieces):
        places = _runs(number, len(pieces), layout)
        for (i, _, _), values in zip(places, each, strict=True):
            runs[i].append(values)
    joined = []
    for (order, shape), run in zip(layout, runs, strict=True):
        back = sorted(range(len(order)), key=order.__getitem__)
        joined.append(torch.cat(run).view(shape).permute(back))
    return tuple(joined)
