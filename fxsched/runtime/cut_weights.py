"""Parts of weights, as shards of stages read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ir.graphs import PartOf


def cut_weights(args: Sequence[Any], parts: Sequence[PartOf]) -> list[Tensor]:
    """The parts, in their order, of the weights among the arguments of a call; autograd
    joins their gradients."""
    cut: dict[int, Sequence[Tensor]] = {}
    for part in parts:
        if part.input not in cut:
            cut[part.input] = _cut(args[part.input], part)
    return [cut[part.input][part.number] for part in parts]


def _cut(weight: Tensor, part: PartOf) -> list[Tensor]:
    """All parts of a weight."""
    if part.outer == 1:
        return [each.contiguous() for each in weight.chunk(part.parts, part.dim)]
    blocks = torch.unflatten(weight, part.dim, (part.outer, part.parts, -1))
    return [
        each.flatten(part.dim, part.dim + 1) for each in blocks.unbind(part.dim + 1)
    ]
