"""The user's optimizer, one stage at a time."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..ir.graphs import Group
from ..jobs import PlanError


def checked_optimizer(optimizer: object) -> Optimizer | None:
    """An optimizer that can step some of its parameters at a time, or None.

    Raises PlanError for anything else.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, Optimizer):
        raise PlanError(
            f"backend(optimizer={optimizer!r}): give the torch.optim.Optimizer of the "
            "model's parameters"
        )
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"backend(optimizer={name}): its step runs the model again, by a closure, "
            "which a program can't; leave optimizer= out, and step it in the loop"
        )
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    if any(getattr(optimizer, hook) for hook in hooks):
        raise PlanError(
            f"backend(optimizer={name}): it has hooks around its step, which sees one "
            "stage at a time here; remove them, or leave optimizer= out"
        )
    return optimizer


def positions_of(optimizer: Optimizer, args: Sequence[Any]) -> tuple[int, ...]:
    """Positions among the arguments of a call of what an optimizer has, in its order.

    Raises PlanError if it has none of them.
    """
    at = {id(value): i for i, value in enumerate(args) if isinstance(value, Tensor)}
    groups = optimizer.param_groups
    order = [at.get(id(p)) for group in groups for p in group["params"]]
    positions = tuple(position for position in order if position is not None)
    if not positions:
        raise PlanError(
            "backend(optimizer=): it has none of the model's parameters; give the one "
            "that was made for this model"
        )
    return positions


class StageOptimizers:
    """Steps of an optimizer by groups of a plan's weights, in calls of the plan.

    Each is the user's own, on some of its parameters: an object of its class that
    shares all it has, its state among it, but for the parameters. What the user changes
    between calls, such as learning rates, holds from the next step on.

    copies: how many workers of this process update each group, which share its tensors:
        the first of their calls takes the step.
    """

    def __init__(
        self, optimizer: Optimizer, groups: Sequence[Group], copies: Sequence[int]
    ) -> None:
        self.optimizer, self.groups, self.copies = optimizer, groups, copies
        self.locks = [threading.Lock() for _ in groups]
        self.calls = [0] * len(groups)
        self.parameters: list[list[Tensor]] = []
        self.own = [_sharing(optimizer) for _ in groups]

    def begin(self, args: Sequence[Any]) -> StageOptimizers:
        """Takes the parameters of a call."""
        self.calls = [0] * len(self.groups)
        self.parameters = [
            [
                args[state.input]
                for state, trained in zip(group.state, group.trained, strict=True)
                if trained
            ]
            for group in self.groups
        ]
        return self

    def step(
        self, group: int, gradients: Sequence[Tensor], factor: Tensor | None
    ) -> None:
        """A step on a group's parameters in place, with gradients times `factor`; none
        if that is NaN."""
        with self.locks[group]:
            self.calls[group] += 1
            if (self.calls[group] - 1) % self.copies[group]:
                return
            if factor is not None:
                if bool(factor.isnan()):
                    return
                torch._foreach_mul_(list(gradients), factor.to(gradients[0].device))
            _step(self.own[group], self.optimizer, self.parameters[group], gradients)


def _sharing(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class, with the same attributes; the step is the class's
    own, not what a scheduler or a hook put around it."""
    own: Optimizer = object.__new__(type(optimizer))
    own.__dict__.update(optimizer.__dict__)
    own.__dict__.pop("step", None)
    return own


def _step(
    own: Optimizer,
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> None:
    given = set(map(id, parameters))
    own.state, own.defaults = optimizer.state, optimizer.defaults
    restricted = (
        {**group, "params": [p for p in group["params"] if id(p) in given]}
        for group in optimizer.param_groups
    )
    own.param_groups = [group for group in restricted if group["params"]]
    before = [parameter.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    try:
        own.step()
    finally:
        for parameter, old in zip(parameters, before, strict=True):
            parameter.grad = old
    optimizer._opt_called = True  # type: ignore[attr-defined]  # for LRScheduler.step
