"""What a plan computes whose updates are in order of arrival, again by plain PyTorch.

An order of reads and updates for each stage is all that is known of a call. A read is
of the values that the updates before it left; an update takes the gradient that one run
of the model gives on what was read for that microbatch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from ..jobs.job import Direction, Job, PlanError
from .microbatches import Batch, microbatch_of

Values = dict[str, Tensor]


class ArrivalReplay:
    """Trains a model by recorded orders of reads and updates.

    names: of the parameters that each stage's updates are of.
    """

    def __init__(
        self, model: nn.Module, names: dict[int, list[str]], microbatches: int
    ) -> None:
        self.model, self.names, self.microbatches = model, names, microbatches
        self.parameters = dict(model.named_parameters())
        self.clip: float | None = None
        self.batch: Batch = ()
        self.reads: dict[int, Values] = {}  # by microbatch
        self.gradients: dict[int, Values] = {}
        self.losses: dict[int, float] = {}
        self.newest: Values = {}

    def train(
        self,
        batch: Batch,
        optimizer: Optimizer,
        arrivals: Sequence[Job],
        clip: float | None,
    ) -> float:
        """One call; its loss. Raises PlanError for an order that cannot have been."""
        self._check(arrivals)
        self.batch, self.clip = batch, clip
        self.reads, self.gradients, self.losses = {}, {}, {}
        self.newest = self._values(self.parameters)
        queues = {stage: deque[Job]() for stage in self.names}
        for job in arrivals:
            queues[job.stage].append(job)
        while any(queues.values()):
            if not any([self._go_on(queue, optimizer) for queue in queues.values()]):
                raise PlanError(
                    f"replay: arrivals have {min(q[0] for q in queues.values() if q)} "
                    "before the jobs whose results it reads; give backend.arrivals of "
                    "this plan"
                )
        self._put(self.newest)
        return sum(self.losses[b] for b in range(self.microbatches)) / self.microbatches

    def _check(self, arrivals: Sequence[Job]) -> None:
        wanted = Counter(
            Job(stage, b, direction)
            for stage in self.names
            for b in range(self.microbatches)
            for direction in (Direction.FORWARD, Direction.UPDATE)
        )
        odd = wanted - Counter(arrivals) or Counter(arrivals) - wanted
        for job in odd:
            raise PlanError(
                f"replay: arrivals should have {job} once; give backend.arrivals of "
                "each call of this plan"
            )

    def _go_on(self, queue: deque[Job], optimizer: Optimizer) -> bool:
        """A stage's reads and updates up to one that must wait; whether any went."""
        before = len(queue)
        while queue:
            stage, b, direction = queue[0]
            if direction is Direction.FORWARD:
                self._read(stage, b)
            elif b in self.gradients:
                self._update(stage, b, optimizer)
            else:
                break
            queue.popleft()
        return len(queue) < before

    def _read(self, stage: int, microbatch: int) -> None:
        values = self.reads.setdefault(microbatch, {})
        values.update({name: self.newest[name] for name in self.names[stage]})
        if len(values) == sum(map(len, self.names.values())):
            self._run(microbatch, self.reads.pop(microbatch))

    def _run(self, microbatch: int, values: Values) -> None:
        """F and B of a microbatch, on what was read for it."""
        self._put(values)
        args, kwargs = microbatch_of(self.batch, microbatch, self.microbatches)
        loss = self.model(*args, **kwargs)
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.losses[microbatch] = float(loss.detach())
        self.gradients[microbatch] = {
            name: self.parameters[name].grad  # type: ignore[misc]
            for name in self._all()
        }
        self.model.zero_grad()

    def _update(self, stage: int, microbatch: int, optimizer: Optimizer) -> None:
        """Steps one stage's newest parameters: others have no gradient, so that the
        optimizer leaves them out."""
        names = self.names[stage]
        self._put({name: self.newest[name] for name in names})
        for name in names:
            self.parameters[name].grad = self.gradients[microbatch][name]
        optimizer.step()
        self.model.zero_grad()
        own = {name: self.parameters[name] for name in names}
        self.newest.update(self._values(own))

    def _all(self) -> Iterator[str]:
        return (name for names in self.names.values() for name in names)

    def _put(self, values: Values) -> None:
        for name, value in values.items():
            self.parameters[name].data.copy_(value)

    def _values(self, parameters: dict[str, nn.Parameter]) -> Values:
        return {name: each.detach().clone() for name, each in parameters.items()}
