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
from ..ir.ops import Bundle
from ..jobs.job import Job, PlanError
from .call_parts import CallParts
from .clip import note_stepped
from .corrections import VELOCITY, Corrections, with_rate
from .optimizers import parameters_of, sharing

Velocities = tuple[Tensor | None, ...]


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
            f"backend(optimizer={name}): its step needs a closure that runs the model "
            "again, which a program can't do; leave optimizer= out, and step the "
            "optimizer in the training loop"
        )
    if type(optimizer).__module__.startswith("torch.distributed."):
        raise PlanError(
            f"backend(optimizer={name}): it splits its state over ranks itself; give "
            "the optimizer that it wraps, and a schedule with u(s, b)"
        )
    _check_hooks(optimizer)
    return optimizer


def _check_hooks(optimizer: Optimizer) -> None:
    """Raises PlanError for an optimizer with hooks around its step."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise PlanError(
            f"backend(optimizer={type(optimizer).__name__}): it has hooks around its "
            "step, but a program steps one stage at a time; remove the hooks, or leave "
            "optimizer= out, and step the optimizer in the training loop"
        )


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

    leaves_old: whether a step leaves the weights before it as they are, and makes new
        ones: where workers of one process share them, and read several versions.

    Workers of one process that keep a group share its tensors: of each update, the
    first of them takes the step.

    corrections: of learning rates, and what velocities are of.
    parts: of weights that are cut into shards.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[Group],
        leaves_old: bool,
        corrections: Corrections,
        parts: CallParts | None = None,
    ) -> None:
        self.corrections = corrections
        self.parts = parts or CallParts(optimizer, {}, ())
        note_stepped(parameters_of(optimizer))
        self.optimizer, self.groups, self.leaves_old = optimizer, groups, leaves_old
        self.locks = [threading.Lock() for _ in groups]
        self.own = [sharing(optimizer) for _ in groups]
        self.args: Sequence[Any] = ()
        self.place: dict[int, int] = {}  # of parameters, in the optimizer's groups
        self.before: list[Tensor] = []  # where weights were before the call
        self.versions: list[list[Bundle]] = []  # by group, after each step
        self.velocities: list[list[Velocities]] = []  # by group, and version if kept
        self.arrivals: list[Job] = []  # of the last call

    def begin(self, args: Sequence[Any]) -> StageOptimizers:
        """Takes the parameters of a call."""
        _check_hooks(self.optimizer)
        args = self.args = self.parts.begin(args)
        self.versions, self.arrivals = [[] for _ in self.groups], []
        self.before = [args[i].data for i in self._all()] if self.leaves_old else []
        self.place = {
            id(parameter): number
            for number, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
        }
        for part, weight in self.parts.weights().items():
            if id(weight) in self.place:
                self.place[part] = self.place[id(weight)]
        self.velocities = [[self._velocities(i)] for i in range(len(self.groups))]
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for LRScheduler.step
        return self

    def of(self, worker: int) -> StageOptimizers:
        """What steps one worker's weights: they are the same for all."""
        return self

    def end(self) -> None:
        """Lets go of the parameters, with their values where they were before."""
        for i, place in zip(self._all(), self.before, strict=bool(self.before)):
            place.copy_(self.args[i].data)
            self.args[i].data = place
        self.args, self.before, self.versions, self.velocities = (), [], [], []
        self.parts.end()

    def step(
        self,
        group: int,
        number: int | None,
        gradients: Sequence[Tensor],
        factor: Tensor | None,
    ) -> Bundle | None:
        """The group's step of this number in a call, with gradients times `factor`;
        none if that is NaN. The new weights, if they aren't in the place of the old.

        number: None for a step that comes when it comes.
        """
        with self.locks[group]:
            if number is None:
                self._take(group, gradients, factor)
                return None
            done = self.versions[group]
            if number == len(done):
                self._take(group, gradients, factor)
                done.append(self._bundle(group) if self.leaves_old else ())
                if self.corrections.drifts[group] is not None:
                    kept = self.velocities[group] if self.leaves_old else []
                    self.velocities[group] = [*kept, self._velocities(group)]
            return done[number] if self.leaves_old else None

    def corrected(
        self, group: int, number: int, gap: float, weights: Sequence[Tensor]
    ) -> Bundle:
        """The group's weights before its step of this number in a call, less `gap`
        times their velocity."""
        with self.locks[group]:
            velocities = self.velocities[group][number if self.leaves_old else -1]
        return tuple(
            weight.clone() if velocity is None else weight.sub(velocity, alpha=gap)
            for weight, velocity in zip(weights, velocities, strict=True)
        )

    def note(self, job: str) -> None:
        """Notes a read or an update of a stage's weights, as they come."""
        self.arrivals.append(Job.parse(job))

    def _take(
        self, group: int, gradients: Sequence[Tensor], factor: Tensor | None
    ) -> None:
        if factor is not None:
            if bool(factor.isnan()):
                return
            torch._foreach_mul_(list(gradients), factor.to(gradients[0].device))
        parameters = [self.args[i] for i in trained_inputs(self.groups[group])]
        before = self.corrections.values(group, parameters)
        if self.leaves_old:
            for parameter in parameters:
                parameter.data = parameter.data.clone()
        state = self.optimizer.state
        rate = self.corrections.factor(group, state.get(parameters[0], {}))
        self._step(self.own[group], parameters, gradients, rate)
        self.corrections.note(group, state, parameters, before)

    def _step(
        self,
        own: Optimizer,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        rate: float | None,
    ) -> None:
        own.state, own.defaults = self.optimizer.state, self.optimizer.defaults
        by_group: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            if (number := self.place.get(id(parameter))) is not None:
                by_group.setdefault(number, []).append(parameter)
        groups = self.optimizer.param_groups
        whole = [with_rate(groups[number], rate) for number in by_group]
        own.param_groups = [
            {**group, "params": some}
            for group, some in zip(whole, by_group.values(), strict=True)
        ]
        before = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        try:
            own.step()
        finally:
            for parameter, old in zip(parameters, before, strict=True):
                parameter.grad = old
        _check_groups(own, whole)

    def _bundle(self, group: int) -> Bundle:
        state = self.groups[group].state
        return tuple(self.args[each.input].detach() for each in state)

    def _velocities(self, group: int) -> Velocities:
        """Of what a group has; None where there are none yet."""
        if self.corrections.drifts[group] is None:
            return ()
        states = [
            self.optimizer.state.get(self.args[each.input], {})
            for each in self.groups[group].state
        ]
        return tuple(state.get(VELOCITY) for state in states)

    def _all(self) -> list[int]:
        return [i for group in self.groups for i in trained_inputs(group)]


def trained_inputs(group: Group) -> list[int]:
    """Positions in the call of what a group has that gets gradients."""
    return [state.input for state in group.learned]


def _check_groups(own: Optimizer, whole: Sequence[dict[str, Any]]) -> None:
    """Raises PlanError if a step wrote into its param_groups, which are copies."""
    for copied, group in zip(own.param_groups, whole, strict=True):
        for key, value in copied.items():
            if key != "params" and value is not group.get(key):
                raise PlanError(
                    f"backend(optimizer={type(own).__name__}): its step changes "
                    f"{key!r} of its param_groups, once for all parameters, but a "
                    "program steps one stage at a time; leave optimizer= out, and step "
                    "the optimizer in the training loop"
                )
