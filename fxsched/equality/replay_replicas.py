"""What a plan whose replicas are averaged computes, again in one process.

Copies of the model's weights and of the optimizer's state, each trained by plain eager
PyTorch on its own microbatches, and averaged by the formulas. Nothing here is shared
with passes or the runtime.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..jobs.job import Direction, Job
from ..plans.plan import Plan
from .microbatches import Batch, microbatch_of


class Replicas:
    """The copies of a model, one for each worker.

    keepers: the workers that have a replica of each parameter, by name.
    """

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer) -> None:
        self.plan, self.model, self.optimizer = plan, model, optimizer
        self.schedule = plan.schedule
        self.keepers: dict[str, tuple[int, ...]] = {}
        self.stage: dict[str, int] = {}
        for group in plan.groups:
            for state in group.learned:
                self.keepers[state.name] = group.owners
                self.stage[state.name] = group.stages[0]
        self.parameters = dict(model.named_parameters())
        self.values: dict[int, dict[str, Tensor]] = {}  # by worker
        self.states: dict[int, dict[str, dict[str, Any]]] = {}
        self.centre: dict[str, Tensor] = {}
        self.outer = self._outer()

    def _outer(self) -> dict[str, torch.optim.SGD]:
        """The outer optimizer of each parameter, if the schedule has one."""
        if self.schedule.outer is None:
            return {}
        lr, momentum = self.schedule.outer
        return {
            name: torch.optim.SGD(
                [nn.Parameter(self._now(name))],
                lr,
                momentum,
                nesterov=momentum > 0,
            )
            for name in self.keepers
        }

    def train(self, batch: Batch) -> float:
        """One call of the plan; its loss."""
        every = self.schedule.update_every or 1
        self.values = {
            w: {name: self._now(name) for name in self.keepers}
            for w in range(self.schedule.workers)
        }
        self.states = {w: self._state(self.keepers) for w in self.values}
        self.centre = {name: self._now(name) for name in self.keepers}
        total, updates = 0.0, self.schedule.microbatches // every
        for number in range(updates):
            sums: dict[tuple[int, str], list[Tensor]] = {}
            for b in range(number * every, (number + 1) * every):
                total += self._microbatch(b, batch, sums)
            for worker in self.values:
                self._step(worker, sums)
            last = number + 1 == updates
            if (number + 1) % (self.schedule.average_every or 1) == 0:
                self._average(last)
        self._put(self.centre)
        for name, workers in self.keepers.items():
            state = self.states[workers[0]].get(name)
            if state is not None:
                self.optimizer.state[self.parameters[name]] = state
        return total / self.schedule.microbatches

    def _now(self, name: str) -> Tensor:
        return self.parameters[name].detach().clone()

    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.parameters[name].data.copy_(value)

    def _state(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        return {
            name: copy.deepcopy(dict(self.optimizer.state[self.parameters[name]]))
            for name in names
            if self.parameters[name] in self.optimizer.state
        }

    def _microbatch(
        self, b: int, batch: Batch, sums: dict[tuple[int, str], list[Tensor]]
    ) -> float:
        """Forward and backward on the replicas that have this microbatch."""
        owner = {
            name: self.plan.placements[Job(stage, b, Direction.FORWARD)].weights
            for name, stage in self.stage.items()
        }
        self._put({name: self.values[worker][name] for name, worker in owner.items()})
        args, kwargs = microbatch_of(batch, b, self.schedule.microbatches)
        loss = self.model(*args, **kwargs)
        loss.backward()
        for name, worker in owner.items():
            gradient = self.parameters[name].grad
            assert gradient is not None, f"{name} gets a gradient"
            sums.setdefault((worker, name), []).append(gradient.clone())
        self.model.zero_grad()
        return float(loss.detach())

    def _step(
        self, worker: int, sums: Mapping[tuple[int, str], Sequence[Tensor]]
    ) -> None:
        """One worker's update, with the mean of its own gradients."""
        mine = [name for name, workers in self.keepers.items() if worker in workers]
        self._put({name: self.values[worker][name] for name in mine})
        self.optimizer.state.clear()
        for name in mine:
            parameter = self.parameters[name]
            if name in self.states[worker]:
                self.optimizer.state[parameter] = self.states[worker][name]
            dtype = self.plan.gradient_dtype or parameter.dtype
            gradients = [gradient.to(dtype) for gradient in sums[worker, name]]
            total = sum(gradients[1:], gradients[0]) / len(gradients)
            parameter.grad = total.to(parameter.dtype)
        self.optimizer.step()
        for name in mine:
            self.values[worker][name] = self._now(name)
        self.states[worker] = self._state(mine)
        self.model.zero_grad()

    def _average(self, last: bool) -> None:
        alpha = self.schedule.elastic
        for name, workers in self.keepers.items():
            replicas = [self.values[w][name] for w in workers]
            centre = self.centre[name]
            if alpha is None:
                self.centre[name] = sum(replicas[1:], replicas[0]) / len(replicas)
                if name in self.outer:
                    self.centre[name] = self._stepped(name, centre)
            else:
                away = [alpha * (value - centre) for value in replicas]
                self.centre[name] = centre + sum(away[1:], away[0])
            for i, worker in enumerate(workers):
                moved = self.centre[name]
                if alpha is not None and not last:
                    moved = replicas[i] - away[i]
                self.values[worker][name] = moved.clone()
            if alpha is None or last:
                self._average_state(name, workers)

    def _stepped(self, name: str, before: Tensor) -> Tensor:
        """The weights before a round of updates, after the outer step."""
        weights: Tensor = self.outer[name].param_groups[0]["params"][0]
        weights.data.copy_(before)
        weights.grad = before - self.centre[name]
        self.outer[name].step()
        return weights.detach().clone()

    def _average_state(self, name: str, workers: Sequence[int]) -> None:
        states = [self.states[w].get(name, {}) for w in workers]
        for key, value in states[0].items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            mean = sum((s[key] for s in states[1:]), value) / len(states)
            for state in states:
                state[key] = mean.clone()
