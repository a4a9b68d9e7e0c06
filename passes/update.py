"""Steps the optimizer where U runs, and hands the new weights to all that keep them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import fx

from ..clock.weight_fetches import source_of
from ..ir import ops
from ..ir.gradient_sums import finished, next_jobs, root_of
from ..ir.graphs import arguments
from ..ir.request import Request
from ..ir.step_ir import Credit, Line, Made, Message, Running, StepIR, Value
from ..ir.update_inputs import UpdateInputs, add_line, check_trained
from ..jobs.job import Direction, Job, PlanError
from .averages import averages_of


def update_weights(step: StepIR, request: Request) -> StepIR:
    """Replaces each job U by a step of the optimizer for each group of its stage.

    before: 0B1                                                      # worker 1
            0U1                                                      # worker 0
    after:  0B1                                                      # worker 1
            gradients_0 = reduce(0, gradients_0 of worker 0, ..)     # worker 0
            weights_0_0U1 = update(0, 0, weights_0, gradients_0, ..) # worker 0
            weights_0_0U1_copy = renew(weights_0)                    # worker 1

    What several workers gave of the gradients is summed first. With clip_grad_norm or
    skip_nonfinite, the norms of all gradients come before the first update. Workers
    that keep a copy get the new weights after the update: step.renewed. step.updated
    has the weights that jobs read then; step.copies those of earlier versions, where
    request.schedule.version wants them, and those that schedule.drift corrects. With
    request.schedule.average_every each worker updates a replica of its own; see
    averages.py.
    """
    if step.every is None or request.by_arrival:
        return step
    return _Updates(step, request).run()


class Kept(NamedTuple):
    """Weights after so many updates, and a worker that keeps them then."""

    group: int
    version: int
    worker: int


class Copied(NamedTuple):
    """A copy of weights, so many velocities away from them."""

    kept: Kept
    gap: float


class Renewal(NamedTuple):
    """A group whose copy on one worker is to be renewed after an update."""

    group: int
    number: int
    new: Line
    sent: Line


class _Updates:
    def __init__(self, step: StepIR, request: Request) -> None:
        self.step, self.request, self.groups = step, request, step.facts.groups
        self.every = step.every or 1
        self.placeholders = step.weight_inputs
        self.updated: dict[tuple[int, int, int], Line] = {}
        self.renewed: dict[Line, tuple[int, Line | fx.Node]] = {}
        self.wanted: dict[Line, list[Copied]] = {}  # by reader
        self.copied: dict[Kept, list[Copied]] = {}  # all of these
        self.in_place: dict[Kept, list[Credit]] = {}
        self.copies: dict[Copied, Line] = {}
        self.sent: dict[Kept, list[Line]] = {}  # copies that others' are renewed from
        self.lines: list[Line | Message] = []
        self.waiting: dict[int, list[Renewal]] = {}  # by the worker that renews
        self.inputs = UpdateInputs(step, request, self.lines)
        self.averages = averages_of(step, request, self.lines)

    def run(self) -> StepIR:
        check_trained(self.groups, self.request)
        jobs = [(line, line.job) for line in self.step.lines if isinstance(line, Line)]
        self._part_reads([(line, job) for line, job in jobs if job is not None])
        sums = self._sums_after([line for line, _ in jobs])
        for line, job in jobs:
            if job is not None and job.direction is Direction.UPDATE:
                behind = self.waiting.pop(line.worker, [])
                self._update(line, job)
                self._renew_copies(line.worker, behind)
            else:
                self._renew_waiting()
                for key in self.wanted.get(line, ()):
                    self._copy(key, line)
                self.lines.append(line)
            for group, number, n in sums.get(line, ()):
                self.inputs.gradients(group, number, n)
        self._renew_waiting()
        copies = {
            (key.kept.group, line.job): self.copies[key]
            for line, keys in self.wanted.items()
            for key in keys
            if line.job is not None
        }
        return replace(
            self.step,
            lines=self.lines,
            updated=self.updated,
            copies=copies,
            renewed=self.renewed,
        )

    def _sums_after(self, lines: list[Line]) -> dict[Line, list[tuple[int, int, int]]]:
        """Which groups' gradients are summed after a line, of which round and with
        which n: by the root's next job once all are there, so that none of what other
        workers sent stays until U."""
        if self.averages is not None:
            return {}
        place = {line: i for i, line in enumerate(lines)}
        last: dict[tuple[int, int], Line] = {}
        for key, line in self.step.running.items():
            if key.what == "gradients":
                of = key.group, key.round
                last[of] = max(last.get(of, line), line, key=place.__getitem__)
        workers = range(self.request.schedule.workers)
        after = next_jobs(lines, last.values(), workers)
        sums: dict[Line, list[tuple[int, int, int]]] = {}
        for (group, number), line in sorted(last.items(), key=lambda item: item[0]):
            root = root_of(self.groups[group], group)
            sums.setdefault(after[line, root], []).append((group, number, line.n))
        return sums

    def _part_reads(self, jobs: list[tuple[Line, Job]]) -> None:
        """Parts the reads of versions that are not the newest which a job could have
        seen: those on the worker that keeps them, before the update that takes their
        place, go on in place, and that update waits for them; the others read copies.
        """
        live: Counter[tuple[int, int]] = Counter()  # by group and worker
        for line, job in jobs:
            if job.direction is Direction.UPDATE:
                for group in self._updated_by(job.stage):
                    keepers = self.groups[group]
                    if line.worker in keepers.updaters:
                        spread = keepers.updater is not None
                        for owner in keepers.owners if spread else (line.worker,):
                            live[group, owner] += 1
                continue
            gap = self.step.jobs.gap(self.step.jobs.number(job))
            for kept in self._stale(job, gap):
                here = kept.worker == line.worker
                if here and not gap and live[kept.group, kept.worker] == kept.version:
                    self.in_place.setdefault(kept, []).append(Credit(job))
                else:
                    self.wanted.setdefault(line, []).append(Copied(kept, gap))
        for key in dict.fromkeys(key for keys in self.wanted.values() for key in keys):
            self.copied.setdefault(key.kept, []).append(key)

    def _stale(self, job: Job, gap: float) -> list[Kept]:
        """What a job reads of versions before the newest that it could have seen, or
        away from its weights."""
        version = self.step.version(job)
        if version == job.microbatch // self.every and not gap:
            return []
        jobs = self.step.jobs
        number = jobs.number(job)
        call = self.step.recipes[jobs.kind[number]].call
        where = jobs.keeper[number], jobs.worker[number]
        groups = (w.meta["group"] for w in arguments(call)[0] if w.op == "placeholder")
        return [
            Kept(group, version, source_of(self.groups[group].owners, *where))
            for group in groups
            if any(self.groups[group].trained)
        ]

    def _before(self, kept: Kept, line: Line) -> tuple[Value, ...]:
        """What comes before new weights take a version's place: copies of it for those
        that read it later or get it sent, and the jobs that read it there."""
        copies = [self._copy(key, line) for key in self.copied.get(kept, ())]
        copies += self.sent.get(kept, ())
        return (*copies, *self.in_place.get(kept, ()))

    def _copy(self, key: Copied, before: Line) -> Line:
        """The copy of a version, made before the first job that reads it."""
        if key not in self.copies:
            (group, version, worker), gap = key
            verb: str = "copy"
            target: Any = ops.copy
            args: tuple[Any, ...] = (self._weights(*key.kept),)
            if gap:
                self._check_corrected(group, worker)
                verb, target = "correct", ops.correct
                args = (group, version, gap, *args)
            where = Line(worker, f"{verb} {group} v{version}", before.n)
            name = f"weights_{group}_v{version}{'_corrected' if gap else ''}"
            specs = self.placeholders[group].meta["specs"]
            self.copies[key] = add_line(
                self.lines, where, target, args, specs, name, group
            )
        return self.copies[key]

    def _check_corrected(self, number: int, worker: int) -> None:
        """Raises PlanError where weights are not kept by who knows their velocity."""
        group = self.groups[number]
        if worker not in group.updaters:
            raise PlanError(
                f"drift({group.stages[0]}): B reads {group.names[0]} from worker "
                f"{worker}, and its velocity is with worker {group.updaters[0]}, which "
                "u names; leave out u (or zero= of replicate), or drift"
            )

    def _update(self, line: Line, job: Job) -> None:
        """The steps of a stage's groups on one worker."""
        number = job.microbatch // self.every
        groups = [
            group
            for group in self._updated_by(job.stage)
            if line.worker in self.groups[group].updaters
        ]
        gradients = [self._gradients(group, number, line) for group in groups]
        waits = [
            self._before(Kept(group, number, line.worker), line) for group in groups
        ]
        factor = self.inputs.factor(number, line)  # from here on it is the task of U
        first: Job | None = job
        for group, gradient, before in zip(groups, gradients, waits, strict=True):
            weights = self._weights(group, number, line.worker)
            args = (group, number, weights, gradient, factor, *before)
            specs, name = (
                self.placeholders[group].meta["specs"],
                f"weights_{group}_{job}",
            )
            new = add_line(self.lines, line, ops.update, args, specs, name, group)
            new.job, first = first, None
            self.updated[group, number + 1, line.worker] = new
            if self.averages is not None:
                for taken in self.averages.end(group, number, new):
                    self.updated[group, number + 1, taken.worker] = taken
            if self.groups[group].updater is not None:
                self._renew(group, number, new)

    def _gradients(self, group: int, number: int, line: Line) -> Running | Line | Made:
        """What an update takes: the sum of all workers' gradients, or, of a replica,
        those of its own."""
        if self.averages is None:
            return self.inputs.gradients(group, number, line.n)
        self.averages.begin(group, line)
        total = Running("gradients", group, line.worker, number)
        cast = finished(self.step, line, total, group)
        self.lines += [] if cast is None else [cast]
        return cast or total

    def _updated_by(self, stage: int) -> list[int]:
        """The groups that a stage's U updates: those that it is the first to read."""
        return [
            number
            for number, group in enumerate(self.groups)
            if group.stages[0] == stage and any(group.trained)
        ]

    def _weights(self, group: int, number: int, worker: int) -> Line | fx.Node:
        """A group's weights as the updates before left them."""
        known = self.updated.get((group, number, worker))
        return self.placeholders[group] if known is None else known

    def _renew(self, group: int, number: int, new: Line) -> None:
        """Notes that the other workers' copies are behind the update of the one that
        takes it. Where jobs read earlier versions, the next update doesn't wait until
        these are there, so that they are sent from a copy."""
        others = [w for w in self.groups[group].owners if w != new.worker]
        sent = new
        if others and self.request.schedule.version is not None:
            where = Line(new.worker, f"copy {group} after {new.task}", new.n)
            name = f"{new.name}_sent"
            sent = add_line(self.lines, where, ops.copy, (new,), new.specs, name, group)
            self.sent[Kept(group, number + 1, new.worker)] = [sent]
        for owner in others:
            self.waiting.setdefault(owner, []).append(Renewal(group, number, new, sent))

    def _renew_waiting(self) -> None:
        """Renews all copies that are behind."""
        for owner in sorted(self.waiting):
            self._renew_copies(owner, self.waiting.pop(owner))

    def _renew_copies(self, owner: int, renewals: Iterable[Renewal]) -> None:
        for group, number, new, sent in renewals:
            old = self._weights(group, number, owner)
            where = Line(owner, f"renew {group} after {new.task}", new.n)
            before = self._before(Kept(group, number, owner), where)
            args, name = (old, *before), f"{new.name}_copy"
            line = add_line(self.lines, where, ops.renew, args, new.specs, name, group)
            self.renewed[line] = (new.worker, sent)
            self.updated[group, number + 1, owner] = line
