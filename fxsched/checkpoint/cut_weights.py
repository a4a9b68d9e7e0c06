"""Weights that ranks have in parts, whole for a while on the rank that writes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from ..params.full_state import gathered, states_of
from ..params.optimizers import parameters_of
from ..params.record import record_of
from .coordinator import Coordinator


class Whole(NamedTuple):
    """What a rank writes of weights that are cut: their values, and an optimizer's
    state of them."""

    values: dict[Tensor, Tensor]
    states: dict[Tensor, Any]

    @staticmethod
    def of(
        coordinator: Coordinator,
        tensors: Iterable[Tensor],
        optimizer: Optimizer | None = None,
    ) -> Whole:
        """Of those among some tensors, the same on all ranks; each on the rank that
        speaks for it. Every rank calls it."""
        whole, processes = Whole({}, {}), coordinator.processes
        cut = [tensor for tensor in tensors if record_of(tensor).parts]
        if not cut or processes is None:
            return whole
        for tensor in cut:
            value = gathered(processes, tensor, [record_of(tensor).source])
            if value is not None:
                whole.values[tensor] = value
        if optimizer is not None:
            stepped = set(map(id, parameters_of(optimizer)))
            weights = [tensor for tensor in cut if id(tensor) in stepped]
            states = states_of(
                processes, weights, optimizer, lambda tensor: [record_of(tensor).source]
            )
            whole.states.update({weights[i]: each for i, each in states.items()})
        return whole
