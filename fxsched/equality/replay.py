"""Repeats the training of a plan with updates in one process, in eager PyTorch.

This module shares no code with passes or the runtime. The plan says which weights each
job reads, and how many microbatches an update covers. The model, autograd and the
optimizer are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..jobs.job import Direction, Job, PlanError
from ..plans.plan import Plan
from .microbatches import Batch, microbatch_of
from .replay_arrivals import ArrivalReplay
from .replay_replicas import Replicas


def replay(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Batch],
    clip_grad_norm: float | None = None,
    arrivals: Sequence[Sequence[Job]] | None = None,
) -> list[float]:
    """Trains a model in eager PyTorch as a plan does; returns the loss of each batch.

    Each job reads the weights of the version that plan.versions names.

    plan: a plan with updates.
    model: a plain PyTorch model, with the weights from before the plan's first call.
        The model must return the loss, a mean.
    optimizer: a new optimizer of the model's parameters.
    batches: the arguments of each call: a tensor, several tensors, or a dict by name.
        Tensors are cut along dimension 0 into the plan's microbatches, unless rows
        meet.
    clip_grad_norm: the value that the backend got.
    arrivals: backend.arrivals of each call, if updates ran in order of arrival. A job
        then reads the weights after the updates that came before its read, and each
        update steps its stage in that order. None: updates run in the planned order.

    F of a microbatch runs on the weights that its F jobs read, and backward() on those
    that its B jobs read. The optimizer steps the newest weights, with the learning
    rates of schedule.rate. schedule.drift changes the weights of B. Counts of updates
    and velocities start at 0. Raises PlanError for a plan without updates, and if two
    stages read a parameter at different versions, which one run of the model can't do.
    """
    every = plan.schedule.update_every
    if every is None or not plan.updates:
        raise PlanError("replay: the plan has no updates; plan with optimizer=")
    if plan.schedule.average_every is not None:
        replicas = Replicas(plan, model, optimizer)
        return [replicas.train(batch) for batch in batches]
    weights = _Weights(plan, model)
    if arrivals is not None:
        return _arrived(plan, weights, optimizer, batches, clip_grad_norm, arrivals)
    return [weights.train(batch, optimizer, every, clip_grad_norm) for batch in batches]


def _arrived(
    plan: Plan,
    weights: _Weights,
    optimizer: Optimizer,
    batches: Iterable[Batch],
    clip: float | None,
    arrivals: Sequence[Sequence[Job]],
) -> list[float]:
    """The losses of calls whose updates were in these orders."""
    if not plan.by_arrival:
        raise PlanError(
            "replay(arrivals=): the plan's updates are in the planned order; leave "
            "arrivals= out"
        )
    calls = list(batches)
    if len(calls) != len(arrivals):
        raise PlanError(
            f"replay: {len(calls)} batches and arrivals of {len(arrivals)} calls; give "
            "backend.arrivals of each call"
        )
    names: dict[int, list[str]] = {}
    for name, stages in weights.readers.items():
        names.setdefault(stages[0], []).append(name)
    replayed = ArrivalReplay(weights.model, names, plan.schedule.microbatches)
    pairs = zip(calls, arrivals, strict=True)
    return [replayed.train(batch, optimizer, order, clip) for batch, order in pairs]


class _Weights:
    """The parameters of a model, in all versions of a call.

    history: by name, the values after each update of a call, and the velocity then.
    updates: how many there were in all calls.
    """

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self.plan, self.model = plan, model
        self.parameters = dict(model.named_parameters())
        self.history: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.updates = 0
        self.sums: dict[str, Tensor] = {}  # where they are in another type
        self.readers: dict[str, tuple[int, ...]] = {}
        for group in plan.groups:
            for name in map(plan.weight_name, group.learned):
                self.readers[name] = *self.readers.get(name, ()), *group.stages
        for name in self.readers:
            if name not in self.parameters:
                raise PlanError(
                    f"replay: the model has no parameter {name!r}; give the model that "
                    "the plan was made of"
                )

    def train(
        self, batch: Batch, optimizer: Optimizer, every: int, clip: float | None
    ) -> float:
        """One call of the plan."""
        for name in self.readers:
            value = self.parameters[name].detach().clone()
            past = self.history.get(name)
            velocity = past[-1][1] if past else torch.zeros_like(value)
            self.history[name] = [(value, velocity)]
        microbatches, total = self.plan.schedule.microbatches, 0.0
        if any(joint for _, joint in self.plan.stages.nodes(data="joint")):
            # one update, of all rows
            microbatches = every = 1
        for b in range(microbatches):
            self._put(b, Direction.FORWARD)
            args, kwargs = microbatch_of(batch, b, microbatches)
            loss = self.model(*args, **kwargs)
            self._put(b, Direction.BACKWARD)
            (loss / every).backward()
            self._add_up()
            total += float(loss.detach())
            if (b + 1) % every == 0:
                self._update(optimizer, clip)
        return total / microbatches

    def _add_up(self) -> None:
        """Adds a microbatch's gradients up in the plan's type, if it has one."""
        dtype = self.plan.gradient_dtype
        for name in self.readers if dtype is not None else ():
            gradient = self.parameters[name].grad
            if gradient is not None:
                total = self.sums.get(name)
                new = gradient.to(dtype, copy=True)
                self.sums[name] = new if total is None else total.add_(gradient)
                self.parameters[name].grad = None

    def _put(self, microbatch: int, direction: Direction) -> None:
        """Puts the weights of a microbatch's jobs of a direction in place."""
        versions = self.plan.versions
        for name, stages in self.readers.items():
            jobs = [Job(stage, microbatch, direction) for stage in stages]
            wanted = {
                (versions[job], self._gap(job)) for job in jobs if job in versions
            }
            if len(wanted) > 1:
                raise PlanError(
                    f"replay: {name} is read by {jobs[0]} and {jobs[-1]} at versions "
                    f"{sorted(version for version, _ in wanted)}, or with different "
                    "drifts, but the model has it only once; give a schedule whose "
                    "jobs of a microbatch and direction read the same weights"
                )
            for version, gap in wanted:
                value, velocity = self.history[name][version]
                self._set(name, value - gap * velocity if gap else value)

    def _gap(self, job: Job) -> float:
        drift = self.plan.schedule.drift
        pair = None if drift is None else drift(job.stage)
        return 0.0 if pair is None or job.direction == "F" else pair[0]

    def _decay(self, name: str) -> float:
        """Of a parameter's velocity, by the first of its stages that drifts."""
        drift = self.plan.schedule.drift
        pairs = [] if drift is None else [drift(stage) for stage in self.readers[name]]
        return next((pair[1] for pair in pairs if pair is not None), 0.0)

    def _set(self, name: str, value: Tensor) -> None:
        """In the parameter's memory, which views that autograd saved share, and without
        autograd's notice."""
        self.parameters[name].data.copy_(value)

    def _update(self, optimizer: Optimizer, clip: float | None) -> None:
        """Steps the newest weights."""
        for name, values in self.history.items():
            self._set(name, values[-1][0])
        for name, total in self.sums.items():
            self.parameters[name].grad = total.to(self.parameters[name].dtype)
        self.sums = {}
        if clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        with self._rescheduled(optimizer):
            optimizer.step()
        optimizer.zero_grad()
        self.updates += 1
        for name, values in self.history.items():
            new, decay = self.parameters[name].detach().clone(), self._decay(name)
            old, velocity = values[-1]
            values.append((new, decay * velocity + (1 - decay) * (new - old)))

    @contextmanager
    def _rescheduled(self, optimizer: Optimizer) -> Iterator[None]:
        """Each parameter in a group of its own, with the learning rate of its stage."""
        rate = self.plan.schedule.rate
        if rate is None:
            yield
            return
        stages = {id(self.parameters[n]): each[0] for n, each in self.readers.items()}
        groups = optimizer.param_groups
        optimizer.param_groups = [
            {**group, "params": [p], "lr": group["lr"] / self._divisor(stages[id(p)])}
            for group in groups
            for p in group["params"]
            if id(p) in stages
        ]
        try:
            yield
        finally:
            optimizer.param_groups = groups

    def _divisor(self, stage: int) -> float:
        """PipeMare's T1: tau^p, p = 1 - min(k / K, 1)."""
        rate = self.plan.schedule.rate
        pair = None if rate is None else rate(stage)
        if pair is None:
            return 1.0
        delay, annealed = pair
        return float(delay ** (1 - min(self.updates / annealed, 1)))
