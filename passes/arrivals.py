"""Updates in order of arrival: each steps the weights as its gradient finds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..clock.arrivals import update_rounds
from ..ir import ops
from ..ir.graphs import arguments
from ..ir.request import Request
from ..ir.step_ir import Line, Message, StepIR
from ..ir.update_inputs import UpdateInputs, add_line, check_trained
from ..jobs.job import Direction, Job, PlanError


def update_on_arrival(step: StepIR, request: Request) -> StepIR:
    """Where updates are in order of arrival, replaces each job U by a step on whatever
    weights there are, and has the jobs of a microbatch read one copy of these.

    before: 0F1                                                      # worker 0
            0B1                                                      # worker 0
            0U1                                                      # worker 1
    after:  note(0F1); weights_0_of_1 = copy(weights_0, 0U0)         # worker 1
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
    def __init__(self, step: StepIR, request: Request) -> None:
        self.step, self.request, self.groups = step, request, step.facts.groups
        self.placeholders = step.weight_inputs
        self.groups_of: dict[int, list[int]] = {}  # by the stage that updates them
        for number, group in enumerate(self.groups):
            if any(group.trained):
                self.groups_of.setdefault(group.stages[0], []).append(number)
        self.rounds = update_rounds(request.schedule, step.jobs, self.groups_of)
        self.updates: dict[tuple[int, int], Line] = {}  # by stage and microbatch
        self.reads: dict[tuple[int, int], dict[int, Line]] = {}  # copies by group
        self.lines: list[Line | Message] = []
        self.inputs = UpdateInputs(step, request, self.lines)

    def run(self) -> StepIR:
        check_trained(self.groups, self.request)
        keepers = {stage: self._keeper(stage) for stage in self.groups_of}
        copies: dict[tuple[int, Job], Line] = {}
        for line in self.step.lines:
            assert isinstance(line, Line) and line.job is not None, "jobs alone so far"
            job = line.job
            if job.direction is Direction.UPDATE:
                self._update(line, job)
                continue
            for group in self._read_by(job):
                stage = self.groups[group].stages[0]
                if (stage, job.microbatch) not in self.reads:
                    self._read(stage, line, job, keepers[stage])
                copies[group, job] = self.reads[stage, job.microbatch][group]
                self._check_version(stage, job)
            self.lines.append(line)
        return replace(self.step, lines=self.lines, copies=copies)

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

    def _read_by(self, job: Job) -> Iterator[int]:
        """The groups with updates that a job reads."""
        jobs = self.step.jobs
        call = self.step.recipes[jobs.at[job.stage, job.direction]].call
        for weights in arguments(call)[0]:
            if weights.op == "placeholder" and any(
                self.groups[weights.meta["group"]].trained
            ):
                yield weights.meta["group"]

    def _read(self, stage: int, line: Line, job: Job, keeper: int) -> None:
        """The copies of a stage's weights that a microbatch's jobs read."""
        b = job.microbatch
        read = Job(stage, b, Direction.FORWARD)
        where = Line(keeper, f"read {read}", line.n)
        version = self.step.version(read)
        before = (self.updates[stage, version - 1],) if version else ()
        self._note(where, read)
        self.reads[stage, b] = {
            group: self._copy(where, group, b, before)
            for group in self.groups_of[stage]
        }

    def _copy(
        self, where: Line, group: int, microbatch: int, before: tuple[Line, ...]
    ) -> Line:
        weights = self.placeholders[group]
        args, specs = (weights, *before), weights.meta["specs"]
        name = f"weights_{group}_of_{microbatch}"
        return add_line(self.lines, where, ops.copy, args, specs, name, group)

    def _check_version(self, stage: int, job: Job) -> None:
        read = Job(stage, job.microbatch, Direction.FORWARD)
        versions = self.step.version(read), self.step.version(job)
        if versions[0] != versions[1]:
            raise PlanError(
                f"{read} has seen {versions[0]} updates and {job} {versions[1]}; where "
                f"updates are in order of arrival (ahead={self._ahead}), all jobs of a "
                "microbatch read the same weights: let version(s, b, d) depend on b "
                "alone, or take order='static'"
            )

    def _update(self, line: Line, job: Job) -> None:
        """The steps of a stage's groups."""
        stage, b = job.stage, job.microbatch
        groups = self.groups_of[stage]
        gradients = [self.inputs.gradients(group, b, line.n) for group in groups]
        before = [self._earlier(job, other) for other in self._awaited(stage, b)]
        factor = self.inputs.factor(b, line)  # from here on it is the task of U
        self._note(line, job)
        for group, gradient in zip(groups, gradients, strict=True):
            weights = self.placeholders[group]
            args = (group, None, weights, gradient, factor, *before)
            name, specs = f"weights_{group}_{job}", weights.meta["specs"]
            new = add_line(self.lines, line, ops.update, args, specs, name, group)
            if (stage, b) not in self.updates:
                new.job = job
                self.updates[stage, b] = new

    def _awaited(self, stage: int, microbatch: int) -> list[int]:
        """The updates of a stage that one waits for, by microbatch."""
        return self.rounds[stage].awaited(microbatch, self._ahead)

    def _earlier(self, job: Job, microbatch: int) -> Line:
        update = self.updates.get((job.stage, microbatch))
        if update is None:
            raise PlanError(
                f"{job} may be {self._ahead} updates ahead and waits for "
                f"{job.stage}U{microbatch}, which is planned after it; deal "
                "microbatches to workers in turns, or take a larger ahead"
            )
        return update

    def _note(self, where: Line, job: Job) -> None:
        add_line(self.lines, where, ops.note, (str(job),), (), f"note_{job}")
