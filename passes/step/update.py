"""Steps the optimizer where U runs, and hands the new weights to all that keep them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ...ir import ops
from ...ir.meta import of_call
from ...ir.request import Request
from ...ir.step import (
    Message,
    Op,
    Stale,
    Step,
    Total,
    Value,
    Weights,
    with_weights,
)
from ...jobs.job import Direction, Job
from .averages import averages_of
from .update_inputs import UpdateFactors, check_trained


def update_weights(step: Step, request: Request) -> Step:
    """Replaces each job U by a step of the optimizer for each group of its stage.

    before: 0U1                                                      # worker 0
            0F2, weights_0 of worker 0                               # worker 0
    after:  weights_0_0U1 = update(0, 0, weights_0, gradients_0, ..) # worker 0
            weights_0_0U1_copy = renew(weights_0, weights_0_0U1)     # worker 1
            0F2, weights_0_0U1                                       # worker 0

    An update makes a new version of the weights, and jobs read the version that the
    schedule says: one that may be gone by then is Stale. With clip_grad_norm or
    skip_nonfinite, the norms of all gradients come before the first update. Workers
    that keep a copy get the new weights after the update. With
    request.schedule.average_every each worker updates a replica of its own; see
    averages.py.
    """
    if step.every is None or request.by_arrival:
        return step
    return _Updates(step, request).run()


class Renewal(NamedTuple):
    """A group whose copy on one worker is to be renewed after an update."""

    group: int
    number: int
    new: Op


class _Updates:
    def __init__(self, step: Step, request: Request) -> None:
        self.step, self.request, self.groups = step, request, step.facts.groups
        self.every = step.every or 1
        self.weights: dict[tuple[int, int, int], Op] = {}  # group, version, worker
        self.lines: list[Op | Message] = []
        self.waiting: dict[int, list[Renewal]] = {}  # by the worker that renews
        self.factors = UpdateFactors(step, request, self.lines)
        self.averages = averages_of(step, request, self.lines)

    def run(self) -> Step:
        check_trained(self.groups, self.request)
        for op in self.step.ops:
            job = op.job
            assert job is not None, "jobs alone so far"
            if job.direction is Direction.UPDATE:
                behind = self.waiting.pop(op.worker, [])
                self._update(op, job)
                self._renew_copies(op.worker, behind)
                continue
            self._renew_waiting()
            with_weights(op, partial(self._read, job))
            self.lines.append(op)
        self._renew_waiting()
        return replace(self.step, lines=self.lines)

    def _read(self, job: Job, value: Value) -> Value:
        """What a job reads of weights that a worker keeps."""
        if not isinstance(value, Weights):
            return value
        group, jobs = of_call(value.node)["group"], self.step.jobs
        if not any(self.groups[group].trained):
            return value
        number = jobs.number(job)
        version, gap = jobs.version(number), jobs.gap(number)
        read = self._weights(group, version, value.worker)
        current = version == job.microbatch // self.every and not gap
        if current and job.stage not in self.groups[group].unawaited:
            return read
        return Stale(read, group, version, gap)

    def _weights(self, group: int, version: int, worker: int) -> Op | Weights:
        """A group's weights after so many updates."""
        known = self.weights.get((group, version, worker))
        return known or Weights(self.step.weight_inputs[group], worker)

    def _update(self, op: Op, job: Job) -> None:
        """The steps of a stage's groups on one worker."""
        number = job.microbatch // self.every
        groups = [
            i
            for i, group in enumerate(self.groups)
            if group.stages[0] == job.stage and any(group.trained)  # the first to read
            if op.worker in group.updaters
        ]
        replica = None if self.averages is None else op.worker
        if self.averages is not None:
            self.averages.begin(groups, op)
        factor = self.factors.factor(number, op)  # from here on it is the task of U
        first: Job | None = job
        for group in groups:
            old = self._weights(group, number, op.worker)
            args = (group, number, old, Total(group, number, replica), factor)
            specs, name = self.step.specs(old)[0], f"weights_{group}_{job}"
            where = (op.worker, op.task, op.n)
            new = Op(*where, ops.update, args, specs, name, group, first)
            self.lines.append(new)
            first = None
            self.weights[group, number + 1, op.worker] = new
            if self.averages is not None:
                for taken in self.averages.end(group, number, new):
                    self.weights[group, number + 1, taken.worker] = taken
            elif self.groups[group].updater is not None:
                for owner in self.groups[group].owners:
                    if owner != op.worker:
                        behind = self.waiting.setdefault(owner, [])
                        behind.append(Renewal(group, number, new))

    def _renew_waiting(self) -> None:
        """Renews all copies that are behind."""
        for owner in sorted(self.waiting):
            self._renew_copies(owner, self.waiting.pop(owner))

    def _renew_copies(self, owner: int, renewals: Iterable[Renewal]) -> None:
        """Renews copies on a worker. Where jobs read earlier versions, or give no
        gradient, the next update doesn't wait until the new weights have been sent,
        which are stale then."""
        for group, number, new in renewals:
            sent: Op | Stale = new
            late = self.request.schedule.version is not None
            if late or self.groups[group].unawaited:
                sent = Stale(new, group, number + 1)
            args = (self._weights(group, number, owner), sent)
            where, name = (owner, f"renew {group} after {new.task}", new.n), new.name
            self.weights[group, number + 1, owner] = copy = Op(
                *where, ops.renew, args, new.specs, f"{name}_copy", group
            )
            self.lines.append(copy)
