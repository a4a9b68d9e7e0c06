"""Bytes of a plan's groups of weights, of their gradients and the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..clock.weight_groups import WeightGroup
from .graphs import Role, in_type
from .step import Step, root_of


def weight_groups(
    step: Step, state: Mapping[int, int], dtype: torch.dtype | None
) -> dict[int, WeightGroup]:
    """The groups by number; inputs that all workers have are of no worker's.

    state: bytes of the optimizer's state, by position of the parameter in the call.
    dtype: of sums of gradients; None for the parameters' own.
    """
    groups = {}
    for number, node in step.weight_inputs.items():
        group = step.facts.groups[number]
        specs = list(zip(group.state, group.trained, node.meta["specs"], strict=True))
        own = tuple(spec for _, trained, spec in specs if trained)
        sums = in_type(own, dtype)
        groups[number] = WeightGroup(
            sum(spec.bytes for each, _, spec in specs if each.role is not Role.SHARED),
            sum(spec.bytes for spec in sums),
            sum(state.get(each.input, 0) for each, trained, _ in specs if trained),
            group.stages[0],
            group.owners,
            root_of(group, number),
            group.updaters,
            group.givers,
            sum(spec.bytes for spec in own) if sums != own else None,
        )
    return groups
