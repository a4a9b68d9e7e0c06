"""Adds up gradients in the order of microbatches, where deterministic=True asks it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from torch import fx

from ..ir import ops
from ..ir.gradient_sums import cast_line, finished, in_type, root_of
from ..ir.request import Request
from ..ir.step_ir import Line, Made, Message, StepIR
from ..jobs.job import Direction

Key = tuple[int, int]  # a group, and how many updates come before this sum's
Term = tuple[int, int, int, Made]  # microbatch, stage from the last, line, gradient


def sum_in_order(step: StepIR, request: Request) -> StepIR:
    """One sum of each group's gradients, of microbatches 0, 1, .. one after the other,
    and of a microbatch's stages from the last to the first, as autograd adds them up.

    before: 0B1                                                      # worker 1
            0B0                                                      # worker 0
    after:  0B1                                                      # worker 1
            0B0                                                      # worker 0
            sum_0_of_1 = reduce(0, grad_0_0, grad_0_1)               # worker 0

    The worker that gives all of a group's gradients adds them up, or else the root,
    which gets each microbatch's. It holds those that come before their turn.
    step.totals has the sums. With request.gradient_dtype a sum starts with microbatch
    0's gradient in that type, and ends in the weights'.
    """
    return _OrderedSums(step, request).run() if request.deterministic else step


class _Where(NamedTuple):
    """Where a sum is made, and what it is called.

    alone: whether this worker gives all that is added up.
    """

    name: str
    worker: int
    alone: bool


class _OrderedSums:
    def __init__(self, step: StepIR, request: Request) -> None:
        self.step, self.workers = step, request.schedule.workers
        self.dtype = request.gradient_dtype
        self.lines = [line for line in step.lines if isinstance(line, Line)]
        self.after: dict[int, list[Line]] = {}  # new lines, by the line before them
        self.totals: dict[Key, Line | Made] = {}

    def run(self) -> StepIR:
        for key, terms in sorted(self._terms().items()):
            self.totals[key] = self._sum(key, sorted(terms, key=lambda term: term[:2]))
        lines: list[Line | Message] = []
        for place, line in enumerate(self.lines):
            lines += [line, *self.after.get(place, ())]
        return replace(self.step, lines=lines, totals=self.totals)

    def _terms(self) -> dict[Key, list[Term]]:
        step, jobs = self.step, self.step.jobs
        gives = [
            [(n, step.parts[n][1]) for n in recipe.nodes if self._is_gradient(n)]
            for recipe in step.recipes
        ]
        terms: dict[Key, list[Term]] = {}
        for place, line in enumerate(self.lines):
            job = line.job
            if job is None or job.direction is Direction.UPDATE:
                continue
            b = job.microbatch
            for node, group in gives[jobs.at[job.stage, job.direction]]:
                term = b, -job.stage, place, Made(node, b)
                terms.setdefault((group, step.round(b)), []).append(term)
        return terms

    def _is_gradient(self, node: fx.Node) -> bool:
        return self.step.parts.get(node, ("",))[0] == "gradients"

    def _sum(self, key: Key, terms: Sequence[Term]) -> Line | Made:
        """The lines that add up the terms; the last of them, or the one term."""
        group, number = key
        root = root_of(self.step.facts.groups[group], group)
        givers = {self.lines[place].worker for _, _, place, _ in terms}
        alone = len(givers) == 1
        worker = givers.pop() if alone else root
        where = _Where(f"{group}" + f" of round {number}" * bool(number), worker, alone)
        total: Line | Made | None = None
        ready = 0
        for b in dict.fromkeys(term[0] for term in terms):
            own = [term for term in terms if term[0] == b]
            ready = max(ready, *(term[2] for term in own))
            new: Line | Made = own[0][3]
            for term in own[1:]:  # tied weights
                new = self._add(where, ready, f"{b}_{-term[1]}", new, term[3])
            if total is None:
                total = self._begin(where, ready, new)
            else:
                total = self._add(where, ready, f"{b}", total, new)
        assert total is not None, "a group with a key has gradients"
        if worker != root:
            where = _Where(where.name, root, False)
            total = self._add(where, ready, "all", total)
        line, place = self._line(where, ready, "all")
        return self._put(place, finished(self.step, line, total, group)) or total

    def _begin(self, where: _Where, ready: int, new: Line | Made) -> Line | Made:
        """The first of what is added up, in the type of the sum."""
        specs = in_type(self.step.specs(new)[0], self.dtype)
        line, place = self._line(where, ready, "0")
        name = f"gradients_{where.name}_0".replace(" ", "_")
        return self._put(place, cast_line(self.step, line, new, specs, name)) or new

    def _add(self, where: _Where, ready: int, what: str, *parts: Line | Made) -> Line:
        """Adds up in the job that gives the last of them, if all are of one worker;
        else in the root's next job, so that the others' come in the meantime."""
        line, place = self._line(where, ready, what)
        specs, _ = self.step.specs(parts[0])
        name = f"gradients_{where.name}_{what}".replace(" ", "_")
        target, args = (
            (ops.accumulate, parts) if where.alone else (ops.reduce, (0, *parts))
        )
        new = Line(where.worker, line.task, line.n, target, args, specs, name)
        self.after.setdefault(place, []).append(new)
        return new

    def _line(self, where: _Where, ready: int, what: str) -> tuple[Line, int]:
        """The task that adds something up once a line is done, and its place."""
        n, task, place = self.lines[ready].n, self.lines[ready].task, ready
        if not where.alone:
            task, place = f"add {what} to {where.name}", self._next(where.worker, ready)
        return Line(where.worker, task, n), place

    def _put(self, place: int, line: Line | None) -> Line | None:
        if line is not None:
            self.after.setdefault(place, []).append(line)
        return line

    def _next(self, worker: int, ready: int) -> int:
        """The place of a worker's next job, or before the next update, which may be
        the one that takes the sum."""
        places = self._places[worker]
        i = bisect_right(places, ready)
        place = places[i] if i < len(places) else ready
        i = bisect_right(self._updates, ready)
        return min([place, *(update - 1 for update in self._updates[i : i + 1])])

    @cached_property
    def _places(self) -> list[list[int]]:
        """Of each worker's jobs."""
        places: list[list[int]] = [[] for _ in range(self.workers)]
        for place, line in enumerate(self.lines):
            if line.job is not None:
                places[line.worker].append(place)
        return places

    @cached_property
    def _updates(self) -> list[int]:
        """The places of all updates."""
        kinds = [line.job and line.job.direction for line in self.lines]
        return [i for i, kind in enumerate(kinds) if kind is Direction.UPDATE]
