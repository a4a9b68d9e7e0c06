"""Parts of weights, as shards of stages read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..ir.parts import PartOf
from ..state.cuts import CUTS


def cut_weights(args: Sequence[Any], parts: Mapping[int, PartOf]) -> list[Tensor]:
    """The parts, in their order, of the weights among the arguments of a call: those
    that ranks have, or else views of the weight, whose gradients autograd joins."""
    cut: dict[int, Sequence[Tensor]] = {}
    for part in parts.values():
        if part.input not in cut:
            weight = args[part.input]
            kept = CUTS.get(weight)
            cut[part.input] = part.cut.of(weight) if kept is None else kept.parts
    return [cut[part.input][part.number] for part in parts.values()]
