"""What a plan with updates computes, again in one process by plain eager PyTorch.

Nothing here is shared with passes or the runtime: the plan says which weights each job
reads, and how many microbatches an update is for; the model, autograd and the optimizer
are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..jobs.job import Direction, Job, PlanError
from ..plans.plan import Plan

Batch = Tensor | Sequence[Any] | Mapping[str, Any]


def replay(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Batch],
    clip_grad_norm: float | None = None,
) -> list[float]:
    """Trains the model as the plan does, each job on the weights that plan.versions
    names; gives the loss of each batch.

    model: plain PyTorch, as it was before the plan's first call. It returns the loss,
        a mean.
    optimizer: of its parameters.
    batches: of each call, the arguments: a tensor, several, or a dict by name. Tensors
        are cut along dimension 0 into the plan's microbatches.
    clip_grad_norm: as given to the backend.

    F of a microbatch runs on the weights of its F jobs, backward() on those of its B
    jobs, and the optimizer steps the newest. Raises PlanError for a plan without
    updates, and where a parameter is read by two stages at different versions, which
    one run of the model can't do.
    """
    every = plan.schedule.update_every
    if every is None or not plan.updates:
        raise PlanError("replay: the plan has no updates; plan with optimizer=")
    weights = _Weights(plan, model)
    return [weights.train(batch, optimizer, every, clip_grad_norm) for batch in batches]


class _Weights:
    """The parameters of a model, in all versions of a call.

    history: by name, the values after each update.
    """

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self.plan, self.model = plan, model
        self.parameters = dict(model.named_parameters())
        self.history: dict[str, list[Tensor]] = {}
        self.readers = {
            state.name: group.stages
            for group in plan.groups
            for state, trained in zip(group.state, group.trained, strict=True)
            if trained
        }
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
        self.history = {
            name: [self.parameters[name].detach().clone()] for name in self.readers
        }
        microbatches, total = self.plan.schedule.microbatches, 0.0
        for b in range(microbatches):
            self._put(b, Direction.FORWARD)
            args, kwargs = _part(batch, b, microbatches)
            loss = self.model(*args, **kwargs)
            self._put(b, Direction.BACKWARD)
            (loss / every).backward()
            total += float(loss.detach())
            if (b + 1) % every == 0:
                self._update(optimizer, clip)
        return total / microbatches

    def _put(self, microbatch: int, direction: Direction) -> None:
        """Puts the weights of a microbatch's jobs of a direction in place."""
        versions = self.plan.versions
        for name, stages in self.readers.items():
            jobs = [Job(stage, microbatch, direction) for stage in stages]
            wanted = {versions[job] for job in jobs if job in versions}
            if len(wanted) > 1:
                raise PlanError(
                    f"replay: {name} is read by {jobs[0]} and {jobs[-1]} at versions "
                    f"{sorted(wanted)}; the model has it once"
                )
            for version in wanted:
                self._set(name, self.history[name][version])

    def _set(self, name: str, value: Tensor) -> None:
        """In the parameter's memory, which views that autograd saved share, and without
        autograd's notice."""
        self.parameters[name].data.copy_(value)

    def _update(self, optimizer: Optimizer, clip: float | None) -> None:
        """Steps the newest weights."""
        for name, values in self.history.items():
            self._set(name, values[-1])
        if clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        for name, values in self.history.items():
            values.append(self.parameters[name].detach().clone())


def _part(
    batch: Batch, microbatch: int, microbatches: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A microbatch's arguments."""

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return value.chunk(microbatches)[microbatch]

    if isinstance(batch, Mapping):
        return (), {name: cut(value) for name, value in batch.items()}
    values = (batch,) if isinstance(batch, Tensor) else batch
    return tuple(map(cut, values)), {}
