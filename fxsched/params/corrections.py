"""Learning rates that begin lower, and weights that are read away from where they are.

Both last longer than a call, so they are in the state that the user's optimizer keeps
of a parameter, from its first step here on: state_dict() has them, and they load again.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ir.graphs import Group
from ..jobs.answers import Drift, Rate
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule

UPDATES, VELOCITY = "fxsched_updates", "fxsched_velocity"  # in a parameter's state


class Corrections:
    """What a schedule's rate and drift make of the steps of each group of weights: the
    rate of the first stage that reads it, which is the one that updates it, and the
    decay of the first that has a drift.
    """

    def __init__(self, schedule: Schedule, groups: Sequence[Group]) -> None:
        self.rates: list[Rate | None] = []
        self.drifts: list[Drift | None] = []
        for group in groups:
            drifts = [schedule.stage_drift(stage) for stage in group.stages]
            self.rates.append(schedule.stage_rate(group.stages[0]))
            self.drifts.append(next((drift for drift in drifts if drift), None))

    def factor(self, group: int, state: dict[str, Any]) -> float | None:
        """What learning rates are multiplied by, from the state of one of the group's
        parameters; None where they stay."""
        rate = self.rates[group]
        return None if rate is None else rate.factor(state.get(UPDATES, 0))

    def values(self, group: int, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """Parameters as they are before a step, to be noted after it."""
        if self.drifts[group] is None:
            return None
        return [parameter.detach().clone() for parameter in parameters]

    def note(
        self,
        group: int,
        state: MutableMapping[Tensor, dict[str, Any]],
        parameters: Sequence[Tensor],
        before: Sequence[Tensor] | None,
    ) -> None:
        """Notes a step in the optimizer's state. Velocities are new tensors: the ones
        before may be read yet."""
        if self.rates[group] is not None:
            for parameter in parameters:
                own = state[parameter]
                own[UPDATES] = own.get(UPDATES, 0) + 1
        drift = self.drifts[group]
        if drift is None or before is None:
            return
        for parameter, old in zip(parameters, before, strict=True):
            own, change = state[parameter], parameter.detach() - old
            velocity = own.get(VELOCITY)
            velocity = torch.zeros_like(change) if velocity is None else velocity
            own[VELOCITY] = torch.lerp(change, velocity, drift.decay)


def with_rate(group: dict[str, Any], factor: float | None) -> dict[str, Any]:
    """One of an optimizer's param_groups, with its learning rate times a factor."""
    if factor is None or factor == 1.0:
        return group
    if "lr" not in group:
        raise PlanError(
            "Schedule(rate=) is about learning rates, and the optimizer has no lr; "
            "leave out rate="
        )
    return {**group, "lr": group["lr"] * factor}
