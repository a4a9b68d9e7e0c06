"""Adds up gradients of what all microbatches read of joint stages as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from ..ir import joint, ops
from ..ir.request import Request
from ..ir.step_ir import Line, Made, Message, StepIR


def sum_shared(step: StepIR, request: Request) -> StepIR:
    """Each worker adds up the gradients of its own microbatches; B of the joint stage
    gets the sum of these, in the order of workers. With deterministic=True it gets all
    of them, and adds them up in the order of microbatches.

    before: 1B0                                                      # worker 0
            1B1                                                      # worker 0
            2B*                                                      # worker 1
    after:  1B0                                                      # worker 0
            1B1; grad_x_of_1B1 = add(grad_x_0, grad_x_1)             # worker 0
            total_grad_x = add(grad_x_of_1B1); 2B*                   # worker 1
    """
    sums = _Sums(step, request.deterministic)
    if not sums.pointers:
        return step
    lines: list[Line | Message] = []
    for line in step.lines:
        if isinstance(line, Message) or line.job is None:
            lines.append(line)
        else:
            lines += [*sums.totals(line), line, *sums.parts(line)]
    return replace(step, lines=lines, shared=sums.shared)


class _Sums:
    """pointers: to sums, by the gradient that they are of.

    shared: the line that is the sum, by the pointer to it.
    """

    def __init__(self, step: StepIR, in_order: bool) -> None:
        self.step, self.in_order = step, in_order
        found = [node for node in step.graph.graph.nodes if node.target is joint.total]
        self.pointers = {node.all_input_nodes[0]: node for node in found}
        self.shared: dict[fx.Node, Line] = {}
        self.made: dict[
            fx.Node, dict[int, Made | Line]
        ] = {}  # by worker, or microbatch
        self.gives: dict[int, list[fx.Node]] = {}  # by kind of job
        self.reads: dict[int, list[fx.Node]] = {}
        for gradient, pointer in self.pointers.items():
            self.gives.setdefault(step.maker[gradient], []).append(gradient)
            for reader in {step.maker[user] for user in pointer.users}:
                self.reads.setdefault(reader, []).append(gradient)

    def parts(self, line: Line) -> Iterator[Line]:
        """What a worker adds up after one of its jobs."""
        job = line.job
        assert job is not None
        for gradient in self.gives.get(self._kind(line), ()):
            value: Made | Line = Made(gradient, job.microbatch)
            own = self.made.setdefault(gradient, {})
            if self.in_order:
                own[job.microbatch] = value
                continue
            if line.worker in own:
                value = self._add(line, f"{gradient.name}_of_{job}", gradient)
                value.args = (own[line.worker], Made(gradient, job.microbatch))
                yield value
            own[line.worker] = value

    def totals(self, line: Line) -> Iterator[Line]:
        """What a joint job reads of all workers."""
        for gradient in self.reads.get(self._kind(line), ()):
            total = self._add(line, f"total_{gradient.name}", gradient)
            own = self.made[gradient]
            total.args = tuple(own[place] for place in sorted(own))
            self.shared[self.pointers[gradient]] = total
            yield total

    def _kind(self, line: Line) -> int:
        """That of its job; -1 for an update."""
        assert line.job is not None
        return self.step.jobs.at.get((line.job.stage, line.job.direction), -1)

    def _add(self, line: Line, name: str, like: fx.Node) -> Line:
        specs = like.meta["specs"]
        return Line(line.worker, line.task, line.n, ops.add, (), specs, name)
