"""Moves values to the workers that read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from ..ir import joint
from ..ir.request import Request
from ..ir.step_ir import Credit, Line, Made, Message, Running, StepIR, Value, values_in


def insert_transfers(step: StepIR, request: Request) -> StepIR:
    """A message for each foreign reader, after the line that makes the value.

    before: 0F0                                                      # worker 0
            1F0                                                      # worker 1
    after:  0F0                                                      # worker 0
            message 3: a_0 from worker 0 to worker 1
            1F0                                                      # worker 1

    A worker gets a value once, however many of its jobs read it.
    """
    routes = _Routes(step)
    lines: list[Line | Message] = []
    tag = sum(isinstance(line, Message) for line in step.lines)
    for line in step.lines:
        lines.append(line)
        if isinstance(line, Message):
            continue
        worker, task, n = line.worker, line.task, line.n
        for value, readers in routes.of(line):
            for to in sorted(readers):
                if to != worker:
                    lines.append(Message(tag, worker, to, value, task, n))
                    tag += 1
    return replace(step, lines=lines)


class _Routes:
    """Which workers read what each line makes."""

    def __init__(self, step: StepIR) -> None:
        self.step, jobs, self.running = step, step.jobs, step.running
        self.worker, self.at, self.grid = jobs.worker, jobs.at, jobs.grid.tolist()
        self.others = _others(step)
        named = {value.node for value in self.others if isinstance(value, Made)}
        self.routes = [_routes(step, kind, named) for kind in range(len(jobs.preds))]

    def of(self, line: Line) -> Iterator[tuple[Value, Iterable[int]]]:
        """What a line makes that others read, in the order of the line's nodes."""
        job, others = line.job, self.others
        if line.target is not None or job is None:
            if line in others:
                yield line, others[line]
            return
        b = job.microbatch
        row, kind = self.grid[b], self.at[job.stage, job.direction]
        for node, kinds, parts, more, part in self.routes[kind]:
            readers = {self.worker[row[k]] for k in kinds}
            readers |= {self.worker[k] for k in parts}
            if more:
                readers |= others.get(Made(node, b), set())
            yield Made(node, b), readers
            if part is not None:
                number = self.step.round(b) if part[0] == "gradients" else 0
                key = Running(part[0], part[1], line.worker, number)
                if key in others and self.running[key] is line:
                    yield key, others[key]
        credit = Credit(job)
        if credit in others:
            yield credit, others[credit]


def _others(step: StepIR) -> dict[Value, set[int]]:
    """The readers of values that are not jobs of the same microbatch."""
    readers: dict[Value, set[int]] = {}
    for line in step.lines:
        if isinstance(line, Line) and line.args:
            for value in values_in(line.args):
                readers.setdefault(value, set()).add(line.worker)
    for worker, results in step.results.items():
        for value in values_in(results):
            readers.setdefault(value, set()).add(worker)
    for job, last in step.credits.items():
        worker = step.jobs.worker[step.jobs.number(job)]
        readers.setdefault(Credit(last), set()).add(worker)
    return readers


class _Route(NamedTuple):
    """A node of a kind of job that others read: the kinds of jobs that do, in the same
    microbatch; of a joint stage's, the numbers of those that do in another; whether it
    has readers besides, and what it is a part of."""

    node: fx.Node
    kinds: tuple[int, ...]
    numbers: tuple[int, ...]
    more: bool
    part: tuple[str, int] | None


def _routes(step: StepIR, kind: int, named: set[fx.Node]) -> list[_Route]:
    routes: list[_Route] = []
    for node in step.recipes[kind].nodes:
        readers = {step.maker[u] for u in node.users if u in step.maker}
        kinds, part = tuple(sorted(readers - {kind})), step.parts.get(node)
        numbers: tuple[int, ...] = ()
        if step.jobs.joint:
            more, numbers = _through_pointers(step, node)
            kinds = tuple(sorted({*kinds, *more} - {kind}))
        if kinds or numbers or node in named or part is not None:
            routes.append(_Route(node, kinds, numbers, node in named, part))
    return routes


def _through_pointers(step: StepIR, node: fx.Node) -> tuple[set[int], tuple[int, ...]]:
    """The kinds of joint jobs that read a value in all microbatches, and the numbers of
    jobs that read a joint value in one."""
    kinds, numbers = set[int](), set[int]()
    for pointer in filter(joint.is_pointer, node.users):
        readers = [step.maker[u] for u in pointer.users if u in step.maker]
        if pointer.target is joint.of:
            kinds.update(readers)
        if pointer.target is not joint.each:
            continue
        for b, value in enumerate(pointer.args):
            if value is node:
                numbers.update(step.jobs.find(kind, b) for kind in readers)
    return kinds, tuple(sorted(numbers))
