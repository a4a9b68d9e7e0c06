"""Optimizers of a rank that steps some of a model's parameters must step each by
itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..jobs.job import PlanError
from .optimizer_bytes import alone
from .optimizers import updated_elsewhere

STEPS = 8  # rates that adapt to distances move after a few
_tried: WeakSet[Optimizer] = WeakSet()
_hooks: list[object] = []


def guard_separate_steps(rank: int) -> None:
    """From their next step on, optimizers that put numbers of all parameters together
    are refused, where other ranks than this one step some of theirs.

    The first step of each tries it on a copy, with two small parameters together and
    one alone.
    """

    def before(optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in _tried and updated_elsewhere(optimizer, rank):
            if not all(_is_separate(optimizer, g) for g in optimizer.param_groups):
                raise PlanError(
                    f"{type(optimizer).__name__} steps each parameter by numbers of "
                    "all of them, and this rank has only some; take an optimizer that "
                    "steps each by itself, such as AdamW"
                )
            _tried.add(optimizer)

    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(before))


def _is_separate(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a parameter is stepped as it would be alone; True, if a copy of the
    optimizer can't be stepped."""
    if isinstance(optimizer, LBFGS):
        return False
    try:
        both, one = (_stepped(optimizer, group, count) for count in (2, 1))
    except Exception:  # of a class of the user's, that can't be made anew
        return True
    return torch.allclose(both, one, rtol=1e-5, atol=0)


def _stepped(optimizer: Optimizer, group: Mapping[str, Any], count: int) -> Tensor:
    """The first of some parameters, after steps on all."""
    device = group["params"][0].device
    numbers = torch.linspace(-1, 1, 16, device=device).view(4, 4)
    parameters = [(numbers * 10.0**i).requires_grad_() for i in range(count)]
    copy = alone(optimizer, group, parameters[0])
    copy.param_groups[0]["params"] = parameters
    for step in range(STEPS):
        for i, parameter in enumerate(parameters):
            parameter.grad = (numbers.flip(0) + step / STEPS) * 30.0**i
        with torch.no_grad():
            copy.step()
    return parameters[0].detach() - numbers
