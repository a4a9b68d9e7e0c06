"""Averages replicas of weights that have taken steps of their own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from ...clock.jobs import sum_root
from ...clock.replicas import check_replicas
from ...ir import ops
from ...ir.graphs import Specs
from ...ir.request import Request
from ...ir.step import Message, Op, Step, Weights
from ...jobs.job import PlanError


class Averages:
    """Makes the ops that average the replicas of a group, where it is time.

    before: weights_0_0U3 = update(0, 0, weights_0, ..)              # worker 0
            weights_0_0U3 = update(0, 0, weights_0, ..)              # worker 1
    after:  own_0_0U3 = replica(0, True, False, weights_0_0U3)       # worker 0
            own_0_0U3 = replica(0, True, False, weights_0_0U3)       # worker 1
            mean_0_0U3 = average(None, None, own_0_0U3, own_0_0U3)   # worker 0
            weights_0_mean = take(0, None, weights_0_0U3, mean, ..)  # worker 0
            weights_0_mean = take(0, None, weights_0_0U3, mean, ..)  # worker 1

    lines: where they go.
    """

    def __init__(self, step: Step, request: Request, lines: list[Op | Message]) -> None:
        self.step, self.request, self.lines = step, request, lines
        self.schedule = request.schedule
        self.updates = self.schedule.microbatches // (step.every or 1)
        self.replicas: dict[int, list[Op]] = {}  # by group, of this round
        self.centres: dict[tuple[int, int], Op] = {}  # by group and worker

    def check(self) -> None:
        """Raises PlanError for groups that aren't replicas, and for norms of all
        gradients, of which each replica has its own."""
        if self.request.clip_grad_norm is not None or self.request.skip_nonfinite:
            raise PlanError(
                "clip_grad_norm and skip_nonfinite go by one norm of all gradients, "
                "and with average_every each replica has its own; leave them out"
            )
        for group in self.step.facts.groups:
            if any(group.trained):
                jobs, readers = self.step.jobs, group.stages
                check_replicas(self.schedule, jobs, group.owners, readers)

    def begin(self, groups: Sequence[int], update: Op) -> None:
        """Before a worker's first update: it keeps the centre, where there is one."""
        if self.schedule.elastic is None and self.schedule.outer is None:
            return
        for group in groups:
            if (group, update.worker) not in self.centres:
                weights = Weights(self.step.weight_inputs[group], update.worker)
                self._keep_centre(group, weights, update, f"centre_{group}")

    def end(self, group: int, number: int, new: Op) -> list[Op]:
        """After a worker's update of this number: the weights that are in the place of
        all replicas, once the last of these is updated."""
        if not self.schedule.averages(number + 1):
            return []
        elastic, last = self.schedule.elastic, number + 1 == self.updates
        moments = last or elastic is None
        specs, name = self._specs(group, moments), f"own_{new.name}"
        args, where = (group, moments, False, new), (new.worker, new.task, new.n)
        replica = self._add(*where, ops.replica, args, specs, name, group)
        owners = self.step.facts.groups[group].owners
        replicas = self.replicas.setdefault(group, [])
        replicas.append(replica)
        if len(replicas) < len(owners):
            return []
        del self.replicas[group]
        replicas.sort(key=lambda each: each.worker)
        root = sum_root(owners, group)
        where = (root, f"average {group} after {new.task}", new.n)
        centre = None if elastic is None else self.centres[group, root]
        means = (elastic, centre, *replicas)
        name = f"mean_{new.name}"
        mean = self._add(*where, ops.average, means, specs, name, group)
        taken = [self._take(group, last, each, mean, new) for each in replicas]
        for each in taken if self.schedule.outer is not None and not last else ():
            self._keep_centre(group, each, each, f"centre_{each.name}")
        return taken

    def _take(self, group: int, last: bool, own: Op, mean: Op, new: Op) -> Op:
        """An average in the place of one replica, which makes it the new centre."""
        elastic = None if last else self.schedule.elastic
        how = elastic if self.schedule.outer is None else self.schedule.outer
        centre = None if how is None else self.centres[group, own.worker]
        weights = own.args[-1]
        where = (own.worker, f"take {group} after {new.task}", new.n)
        args = (group, how, weights, mean, centre)
        name = f"{weights.name}_mean"
        if elastic is not None:
            self.centres[group, own.worker] = mean
        return self._add(*where, ops.take, args, weights.specs, name, group)

    def _keep_centre(
        self, group: int, weights: Weights | Op, by: Op, name: str
    ) -> None:
        """Has a worker keep a copy of its weights as they are now."""
        args, specs = (group, False, True, weights), self._specs(group, False)
        where = (by.worker, by.task, by.n)
        copied = self._add(*where, ops.replica, args, specs, name, group)
        self.centres[group, by.worker] = copied

    def _add(self, *op: Any) -> Op:
        new = Op(*op)
        self.lines.append(new)
        return new

    def _specs(self, group: int, moments: bool) -> Specs:
        """Of what is trained of a group, and of what the optimizer has of it."""
        learned = self.step.facts.groups[group].learned if moments else ()
        more = (self.request.moments.get(state.input, ()) for state in learned)
        return (*self.step.trained_specs(group), *chain.from_iterable(more))


def averages_of(
    step: Step, request: Request, lines: list[Op | Message]
) -> Averages | None:
    """What averages the replicas of a step; None where all take the same steps.

    Raises PlanError for what can't be averaged.
    """
    if request.schedule.average_every is None:
        return None
    averages = Averages(step, request, lines)
    averages.check()
    return averages
