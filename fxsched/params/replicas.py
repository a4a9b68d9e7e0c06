"""Replicas of weights, and of the optimizer's state, that are averaged now and then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..ir.graphs import Group, Spec, Specs
from ..ir.ops import Bundle
from ..jobs.job import PlanError
from .corrections import Corrections
from .optimizers import sharing
from .updates import StageOptimizers, trained_inputs

OUTER = "fxsched_outer"  # in a parameter's state, the momentum of an outer step


def moment_specs(optimizer: Optimizer, args: Sequence[Any]) -> dict[int, Specs]:
    """Shapes of the state that is averaged with each parameter of a call, by position:
    what the optimizer keeps after a step on as many zeros."""
    at = {id(value): i for i, value in enumerate(args) if isinstance(value, Tensor)}
    known: dict[tuple[object, ...], Specs] = {}
    specs: dict[int, Specs] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) in at:
                kind = number, parameter.shape, parameter.dtype, parameter.device
                if kind not in known:
                    known[kind] = _moments_of_zeros(optimizer, group, parameter)
                specs[at[id(parameter)]] = known[kind]
    return specs


def _moments_of_zeros(
    optimizer: Optimizer, group: dict[str, Any], parameter: Tensor
) -> Specs:
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    zeros = torch.zeros_like(empty).requires_grad_()
    zeros.grad = torch.zeros_like(empty)
    probe = sharing(optimizer)
    probe.state = defaultdict(dict)
    probe.param_groups = [{**group, "params": [zeros]}]
    probe.step()
    return tuple(map(Spec.of, _moments(probe.state[zeros], zeros)))


def _moments(state: Mapping[str, Any], parameter: Tensor) -> list[Tensor]:
    """What is averaged of a parameter's state: its floating tensors, by name. Numbers
    of no dimension, such as how many steps there were, are the same for all replicas,
    and so is the momentum of outer steps.
    """
    values = [state[key] for key in sorted(state) if key != OUTER]
    return [
        value
        for value in values
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and (value.dim() or not parameter.dim())
    ]


class ReplicaOptimizers(StageOptimizers):
    """Steps of an optimizer by workers, each of which has weights of its own.

    The first worker here that keeps a group has the user's own tensors and state; the
    others have copies, made when a call begins. A call ends with an average, so that
    nothing is lost with these.

    moments: shapes of the state that is averaged, by position in the call.
    here: the workers of this process.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[Group],
        corrections: Corrections,
        moments: Mapping[int, Specs],
        here: Collection[int],
    ) -> None:
        super().__init__(optimizer, groups, False, corrections)
        self.moments, self.here = moments, sorted(here)
        self.workers: dict[int, WorkerOptimizer] = {}

    def begin(self, args: Sequence[Any]) -> ReplicaOptimizers:
        """Takes the parameters of a call, and copies them."""
        super().begin(args)
        self.workers = {worker: WorkerOptimizer(self, worker) for worker in self.here}
        return self

    def of(self, worker: int) -> WorkerOptimizer:
        """What steps one worker's weights."""
        return self.workers[worker]

    def end(self) -> None:
        """Lets go of the parameters and of the copies."""
        self.workers = {}
        super().end()


class WorkerOptimizer(StageOptimizers):
    """One worker's weights of a call, and the optimizer of them.

    args: of the call, with copies in the place of what is another worker's here.
    """

    def __init__(self, whole: ReplicaOptimizers, worker: int) -> None:
        copied = {
            id(whole.args[i]): whole.args[i].detach().clone().requires_grad_()
            for group in whole.groups
            if worker != next((w for w in whole.here if w in group.owners), worker)
            for i in trained_inputs(group)
            if worker in group.owners
        }
        self.whole, self.copied = whole, copied
        copies = _copy(whole.optimizer, copied)
        super().__init__(copies, whole.groups, False, whole.corrections)
        self.begin([copied.get(id(value), value) for value in whole.args])

    def step(
        self,
        group: int,
        number: int | None,
        gradients: Sequence[Tensor],
        factor: Tensor | None,
    ) -> Bundle | None:
        """The group's step of this number in a call."""
        if self._is_copied(group):
            return super().step(group, number, gradients, factor)
        return self.whole.step(group, number, gradients, factor)

    def replica(self, group: int, moments: bool) -> Bundle:
        """What is trained of a group, and the state that is averaged with it."""
        inputs = trained_inputs(self.groups[group])
        values = [self.args[i].detach() for i in inputs]
        state = self._state(group)
        for i in inputs if moments else ():
            found = _moments(state.get(self.args[i], {}), self.args[i])
            if tuple(map(Spec.of, found)) != self.whole.moments.get(i, ()):
                raise PlanError(
                    f"backend(optimizer={type(self.whole.optimizer).__name__}): it "
                    "keeps another state than when the call was planned, so that it "
                    "can't be averaged; call backend.reset() after changing it"
                )
            values += found
        return tuple(values)

    def outer_step(
        self,
        group: int,
        outer: tuple[float, float],
        before: Sequence[Tensor],
        mean: Sequence[Tensor],
    ) -> Bundle:
        """The weights before a round of updates after a step of SGD with Nesterov
        momentum, whose gradient is these weights less the mean of the replicas; and the
        mean of the state, where there is any."""
        (lr, momentum), state = outer, self._state(group)
        stepped = []
        inputs = trained_inputs(self.groups[group])
        for i, old, new in zip(inputs, before, mean, strict=False):  # moments follow
            own, gradient = state[self.args[i]], old - new
            last = own.get(OUTER)
            own[OUTER] = gradient if last is None else momentum * last + gradient
            stepped.append(old - lr * (gradient + momentum * own[OUTER]))
        return (*stepped, *mean[len(stepped) :])

    def take(self, group: int, values: Sequence[Tensor]) -> None:
        """Puts weights, and the state if there are values of it too, in the place of
        the worker's own."""
        moments = len(values) > len(trained_inputs(self.groups[group]))
        own = self.replica(group, moments)
        with torch.no_grad():
            torch._foreach_copy_(list(own), list(values))

    def _state(self, group: int) -> dict[Tensor, Any]:
        own = self.optimizer if self._is_copied(group) else self.whole.optimizer
        return own.state

    def _is_copied(self, group: int) -> bool:
        inputs = trained_inputs(self.groups[group])
        return any(self.args[i] is not self.whole.args[i] for i in inputs)


def _copy(optimizer: Optimizer, copied: Mapping[int, Tensor]) -> Optimizer:
    """An optimizer of the same class, of copies of some parameters and their state."""
    copy = sharing(optimizer)
    copy.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        if id(parameter) in copied:
            copy.state[copied[id(parameter)]] = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in state.items()
            }
    copy.param_groups = [
        {**group, "params": [copied[id(p)] for p in group["params"] if id(p) in copied]}
        for group in optimizer.param_groups
    ]
    return copy
