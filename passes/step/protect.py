"""Keeps weights that are read when newer ones may be in their place."""

from __future__ import annotations

from dataclasses import replace

from ...ir import ops
from ...ir.request import Request
from ...ir.step import OVER, Credit, Message, Op, Stale, Step, Value, replace_values
from ...jobs.job import PlanError


def protect_versions(step: Step, request: Request) -> Step:
    """Jobs read stale weights in place where an update can wait for that, else a copy.

    before: weights_0_0U1 = update(0, 0, weights_0, ..)              # worker 0
            0B2, stale weights_0                                     # worker 0
    after:  weights_0_v0 = copy(weights_0)                           # worker 0
            weights_0_0U1 = update(0, 0, weights_0, ..), after copy  # worker 0
            0B2, weights_0_v0                                        # worker 0

    A job on the worker that keeps them, before the update that takes their place, reads
    them in place, and that update comes after its credit. For all others there is a
    copy, from the first job that reads it or the update on, which comes after it; also
    for what is away from its weights by velocities.
    """
    if step.every is None:
        return step
    return _Versions(step).run()


class _Versions:
    def __init__(self, step: Step) -> None:
        self.step = step
        self.credits: dict[Value, list[Value]] = {}  # of jobs that read in place
        self.copied: dict[Value, list[Stale]] = {}  # what is copied of weights
        self.copies: dict[Stale, Op] = {}
        self.lines: list[Op | Message] = []
        self.start = 0  # of a task's lines, which copies come before

    def run(self) -> Step:
        self._part_reads()
        task = None
        for op in self.step.ops:
            if task != (op.worker, op.task):
                self.start, task = len(self.lines), (op.worker, op.task)
            stale = self._stale(op)
            for each in stale:
                self._copy(each, op.n)
            if stale:
                replace_values(op, self.copies)
            if op.target in OVER:
                old = op.args[OVER[op.target]]
                copies = [self._copy(stale, op.n) for stale in self.copied.get(old, ())]
                op.after += (*copies, *self.credits.get(old, ()))
            self.lines.append(op)
        return replace(self.step, lines=self.lines)

    def _part_reads(self) -> None:
        """Has jobs that can read in place do so, and notes what is copied."""
        gone: set[Value] = set()
        for op in self.step.ops:
            for stale in self._stale(op):
                here = self.step.worker(stale) == op.worker and op.job is not None
                if here and not stale.gap and stale.value not in gone:
                    assert op.job is not None
                    self.credits.setdefault(stale.value, []).append(Credit(op.job))
                    replace_values(op, {stale: stale.value})
                elif stale not in self.copied.setdefault(stale.value, []):
                    self.copied[stale.value].append(stale)
            if op.target in OVER:
                gone.add(op.args[OVER[op.target]])

    def _stale(self, op: Op) -> list[Stale]:
        if op.target not in (None, ops.renew):
            return []
        weights = op.args if op.target else op.args[0]
        return [each for each in weights if isinstance(each, Stale)]

    def _copy(self, stale: Stale, n: int) -> Op:
        """The copy of a version, made before the first task that needs it."""
        if stale not in self.copies:
            value, group, version, gap = stale
            worker, specs = self.step.worker(value), self.step.specs(value)[0]
            where = (worker, f"{'correct' if gap else 'copy'} {group} v{version}", n)
            name = f"weights_{group}_v{version}{'_corrected' * bool(gap)}"
            self.copies[stale] = copy = Op(
                *where, ops.copy, (value,), specs, name, group
            )
            if gap:
                self._check_corrected(group, worker)
                copy.target, copy.args = ops.correct, (group, version, gap, value)
            self.lines.insert(self.start, copy)
            self.start += 1
        return self.copies[stale]

    def _check_corrected(self, number: int, worker: int) -> None:
        """Raises PlanError where weights are not kept by who knows their velocity."""
        group = self.step.facts.groups[number]
        if worker not in group.updaters:
            raise PlanError(
                f"drift({group.stages[0]}): B reads {group.names[0]} from worker "
                f"{worker}, but worker {group.updaters[0]}, which u names, has the "
                "velocity; leave out u (or zero= of replicate), or leave out drift"
            )
