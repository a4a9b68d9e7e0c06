"""Parts of weights, as shards of stages read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..ir.parts import PartOf
from ..params.record import record_of


def cut_weights(args: Sequence[Any], parts: Mapping[int, PartOf]) -> dict[int, Tensor]:
    """Parts of weights among the arguments of a call, by their positions: those that
    ranks have, or else of the weight, where autograd joins their gradients."""
    cut: dict[int, Sequence[Tensor]] = {}
    for part in parts.values():
        if part.input not in cut:
            weight = args[part.input]
            kept = record_of(weight).parts
            cut[part.input] = part.cut.of(weight) if kept is None else kept.parts
    return {i: cut[part.input][part.number] for i, part in parts.items()}
