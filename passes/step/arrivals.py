"""Updates in order of arrival: each steps the weights as its gradient finds them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...clock.arrivals import update_rounds
from ...ir import ops
from ...ir.meta import of_call
from ...ir.request import Request
from ...ir.step import Message, Op, Step, Total, Value, Weights, with_weights
from ...jobs.job import Direction, Job, PlanError
from .update_inputs import UpdateFactors, check_trained


def update_on_arrival(step: Step, request: Request) -> Step:
    """Where updates are in order of arrival, replaces each job U by a step on whatever
    weights there are, and has the jobs of a microbatch read one copy of these.

    before: 0F1                                                      # worker 0
            0B1                                                      # worker 0
            0U1                                                      # worker 1
    after:  note(0F1); weights_0_of_1 = copy(weights_0), after 0U0   # worker 1
            0F1, which reads weights_0_of_1                          # worker 0
            0B1, which reads weights_0_of_1                          # worker 0
            note(0U1); update(0, None, weights_0, gradients_0, ..)   # worker 1

    Dependencies are all that there is of an order. A copy waits for the update that
    version(s, b, F) names, its worker's last. An update waits for the one before it of
    the worker that gives its gradient, and for those of all workers that are `ahead`
    rounds before it: so that at no time one worker has had more than so many updates
    more than the slowest (the bound of stale-synchronous parallel, Ho et al. 2013,
    which holds there for reads). Which go first besides, a worker's thread decides,
    which runs a task at a time: no copy is of half an update.
    """
    if step.every is None or not request.by_arrival:
        return step
    return _Arrivals(step, request).run()


class _Arrivals:
    def __init__(self, step: Step, request: Request) -> None:
        self.step, self.request, self.groups = step, request, step.facts.groups
        self.groups_of: dict[int, list[int]] = {}  # by the stage that updates them
        for number, group in enumerate(self.groups):
            if any(group.trained):
                self.groups_of.setdefault(group.stages[0], []).append(number)
        self.rounds = update_rounds(request.schedule, step.jobs, self.groups_of)
        self.keepers = {stage: self._keeper(stage) for stage in self.groups_of}
        self.updates: dict[tuple[int, int], Op] = {}  # by stage and microbatch
        self.reads: dict[tuple[int, int], dict[int, Op]] = {}  # copies by group
        self.lines: list[Op | Message] = []
        self.factors = UpdateFactors(step, request, self.lines)

    def run(self) -> Step:
        check_trained(self.groups, self.request)
        for op in self.step.ops:
            job = op.job
            assert job is not None, "jobs alone so far"
            if job.direction is Direction.UPDATE:
                self._update(op, job)
                continue
            with_weights(op, partial(self._copy_of, op, job))
            self.lines.append(op)
        return replace(self.step, lines=self.lines)

    def _copy_of(self, op: Op, job: Job, value: Value) -> Value:
        """What a job reads of weights: its microbatch's copy, if they are updated."""
        if not isinstance(value, Weights):
            return value
        group = of_call(value.node)["group"]
        if not any(self.groups[group].trained):
            return value
        stage = self.groups[group].stages[0]
        if (stage, job.microbatch) not in self.reads:
            self._read(stage, job.microbatch, op.n)
        self._check_version(stage, job)
        return self.reads[stage, job.microbatch][group]

    def _keeper(self, stage: int) -> int:
        """The worker that keeps a stage's weights."""
        keepers = {
            worker
            for group in self.groups_of[stage]
            for worker in (*self.groups[group].owners, *self.groups[group].updaters)
        }
        if len(keepers) > 1:
            raise PlanError(
                f"stage {stage} has its weights on workers {sorted(keepers)}, and each "
                f"would see updates in another order (ahead={self._ahead}); keep them "
                "on one, or take order='static'"
            )
        (keeper,) = keepers
        return keeper

    @property
    def _ahead(self) -> float:
        return self.request.schedule.ahead

    def _read(self, stage: int, microbatch: int, n: int) -> None:
        """The copies of a stage's weights that a microbatch's jobs read."""
        read, keeper = Job(stage, microbatch, Direction.FORWARD), self.keepers[stage]
        where, version = (keeper, f"read {read}", n), self._version(read)
        before = (self.updates[stage, version - 1],) if version else ()
        self._note(where, read)
        copies = self.reads[stage, microbatch] = {}
        for group in self.groups_of[stage]:
            node, name = (
                self.step.weight_inputs[group],
                f"weights_{group}_of_{microbatch}",
            )
            args, specs = (Weights(node, keeper),), of_call(node)["specs"]
            copy = Op(*where, ops.copy, args, specs, name, group, after=before)
            copies[group] = copy
            self.lines.append(copy)

    def _version(self, job: Job) -> int:
        return self.step.jobs.version(self.step.jobs.number(job))

    def _check_version(self, stage: int, job: Job) -> None:
        read = Job(stage, job.microbatch, Direction.FORWARD)
        versions = self._version(read), self._version(job)
        if versions[0] != versions[1]:
            raise PlanError(
                f"{read} has seen {versions[0]} updates and {job} {versions[1]}; where "
                f"updates are in order of arrival (ahead={self._ahead}), all jobs of a "
                "microbatch read the same weights: let version(s, b, d) depend on b "
                "alone, or take order='static'"
            )

    def _update(self, op: Op, job: Job) -> None:
        """The steps of a stage's groups."""
        stage, b = job.stage, job.microbatch
        awaited = self.rounds[stage].awaited(b, self._ahead)
        before = tuple(self._earlier(job, other) for other in awaited)
        factor = self.factors.factor(b, op)  # from here on it is the task of U
        where = (op.worker, op.task, op.n)
        self._note(where, job)
        for group in self.groups_of[stage]:
            node = self.step.weight_inputs[group]
            args = (group, None, Weights(node, op.worker), Total(group, b), factor)
            name, specs = f"weights_{group}_{job}", of_call(node)["specs"]
            new = Op(*where, ops.update, args, specs, name, group, after=before)
            self.lines.append(new)
            if (stage, b) not in self.updates:
                new.job = job
                self.updates[stage, b] = new

    def _earlier(self, job: Job, microbatch: int) -> Op:
        update = self.updates.get((job.stage, microbatch))
        if update is None:
            raise PlanError(
                f"{job} may be {self._ahead} updates ahead and waits for "
                f"{job.stage}U{microbatch}, which is planned after it; deal "
                "microbatches to workers in turns, or take a larger ahead"
            )
        return update

    def _note(self, where: tuple[int, str, int], job: Job) -> None:
        self.lines.append(Op(*where, ops.note, (str(job),), (), f"note_{job}"))
