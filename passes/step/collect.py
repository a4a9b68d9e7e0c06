"""Puts together what the user gets: outputs, gradients and new buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from ...ir import ops
from ...ir.graphs import Output, Specs, dims, result
from ...ir.joint import resolve
from ...ir.meta import of_call
from ...ir.request import Request
from ...ir.step import JobOutput, Message, Op, Step, Total, Weights
from ...ir.writes import Write
from ...jobs.job import Direction, PlanError
from .buffer_order import check_declared, check_one_writer

Parts = list[tuple[tuple[int, ...], Op]]  # microbatches, and their bundle


def collect_results(step: Step, request: Request) -> Step:
    """Joins outputs and settles buffers of all workers.

    before: 1F0                                                      # worker 1
            1F1                                                      # worker 0
    after:  1F0                                                      # worker 1
            1F1                                                      # worker 0
            gather_output_0 = bundle(loss_0)                         # worker 1
            gather_output_0 = bundle(loss_1)                         # worker 0
            output_0 = total(2, 0.5, ((0,), ..), ((1,), ..))         # worker 1

    step.results says what each worker returns: outputs if it hands them to the user,
    gradients and buffers of what it keeps. If B runs in backward(), each worker pauses
    before the first B, and outputs and buffers go to the pauses instead.
    """
    return _Collection(step, request).run()


class _Collection:
    def __init__(self, step: Step, request: Request) -> None:
        self.step, self.request, self.groups = step, request, step.facts.groups
        self.lines = list(step.ops)
        self.microbatches = request.schedule.microbatches
        self.workers = range(request.schedule.workers)
        self.readers = self.workers if request.readers is None else request.readers
        self.wanted: dict[str, Any] = result(step.graph)
        self.end = max(step.jobs.n, default=0)  # after all jobs
        self.new_lines: list[Op | Message] = []
        self.gathered: dict[str, Parts] = {}
        self.settled: dict[int, Op] = {}  # buffers after the step, by group

    def run(self) -> Step:
        called = self._of_call()
        in_call, self.new_lines = self.new_lines, []
        results = self._of_backward()
        pause = self._pause() if self.step.deferred else None
        if pause is None:
            results = {w: called[w] | results[w] for w in self.workers}
            self.new_lines, in_call = in_call + self.new_lines, []
        else:
            n, target = pause.n, ops.pause
            in_call += [Op(w, "pause", n, target, (called[w],)) for w in self.workers]
        lines: list[Op | Message] = []
        for line in self.lines:
            lines += in_call if line is pause else ()
            lines.append(line)
        return replace(self.step, lines=lines + self.new_lines, results=results)

    def _pause(self) -> Op | None:
        """The first B, which comes after all F."""
        for line in self.lines:
            if line.job is not None and line.job.direction is not Direction.FORWARD:
                return line
        return None

    def _of_call(self) -> dict[int, dict[str, Any]]:
        """Outputs on the workers that hand them out, buffers on their owners."""
        results: dict[int, dict[str, Any]] = {
            w: {"outputs": (), "state": {}, "versions": {}} for w in self.workers
        }
        check_declared(self.request, self.step.facts)
        for position, (output, value) in enumerate(
            zip(self.step.facts.outputs, self.wanted["outputs"], strict=True)
        ):
            nodes: dict[int, Any] = {}
            if output.kept:
                for worker, new in self._version(position, value, output):
                    results[worker]["versions"][str(output.state)] = new
                continue
            if output.kind in ("constant", "given"):
                nodes = dict.fromkeys(self.readers, value)
            elif output.kind in ("scalar", "folded"):
                total = self._total(position, value, output.how, f"output {position}")
                nodes = dict.fromkeys(self.readers, total)
            elif output.kind == "state":
                nodes = dict.fromkeys(self.readers, self._state(position, output))
            elif output.kind == "one" or output.joint:
                last = self._made(value)[-1:]
                parts = self._gather(f"output {position}", last)
                nodes = self._joined(parts, None, f"output {position}", 1)
            else:
                parts = self._gather(f"output {position}", self._made(value))
                nodes = self._joined(parts, output.dim, f"output {position}")
            for worker, node in nodes.items():
                results[worker]["outputs"] += (node,)
        for group in sorted(map(int, self.wanted["state"])):
            new = self._settle(group)
            for worker in self.groups[group].owners:
                results[worker]["state"][str(group)] = new
        return results

    def _of_backward(self) -> dict[int, dict[str, Any]]:
        """Gradients of weights on their owners, of inputs on the readers of outputs."""
        results: dict[int, dict[str, Any]] = {
            w: {"groups": {}, "inputs": {}} for w in self.workers
        }
        for group in self.wanted["groups"] if self.step.every is None else ():
            for worker in self.groups[int(group)].updaters:
                results[worker]["groups"][group] = Total(int(group), 0)
        along = {
            str(of_call(node)["input"]): of_call(node)["dim"]
            for node in self.step.graph.graph.find_nodes(op="placeholder")
            if "input" in of_call(node)
        }
        for key, values in self.wanted["inputs"].items():
            what = f"gradient of input {key}"
            parts = self._gather(what, self._input_gradient(what, values))
            for worker, node in self._joined(parts, along[key], what).items():
                results[worker]["inputs"][key] = node
        return results

    def _total(self, position: int, value: fx.Node, how: str | None, task: str) -> Op:
        """The loss, or what the microbatches' values become by what the user says."""
        parts = self._gather(f"output {position}", self._made(value))
        root, specs = parts[0][1].worker, of_call(value)["specs"]
        if how is not None:
            return self._make(
                ops.fold, (how, self.microbatches, *parts), specs, root, task
            )
        count = 1 if self._is_joint(value) else self.microbatches
        mean = self.request.loss_reduction == "mean"
        scale = 1.0 / count if mean else 1.0
        args = (count, scale, *parts)
        return self._make(ops.total, args, specs, root, task)

    def _joined(
        self, parts: Parts, dim: int | None, what: str, count: int | None = None
    ) -> dict[int, Op]:
        args = (count or self.microbatches, dim, *parts)
        return {w: self._make(ops.collect, args, (), w, what) for w in self.readers}

    def _state(self, position: int, output: Output) -> Op:
        """What a buffer is after the step, as an output."""
        group, place = next(
            (int(group), i)
            for group in self.wanted["state"]
            for i, state in enumerate(self.groups[int(group)].state)
            if state.input == output.state
        )
        new = self._settle(group)
        specs = (new.specs[place],)
        return self._make(
            ops.own_copy, (new, place), specs, new.worker, f"output {position}"
        )

    def _version(
        self, position: int, value: fx.Node, output: Output
    ) -> Iterator[tuple[int, Op | JobOutput]]:
        """What state is after the step, for each of its owners: one that ran F of a
        microbatch has what is the same in all."""
        every = self._made(value)
        by_worker = {self.step.worker(made): made for made in every}
        owners = next(
            group.owners
            for group in self.groups
            if any(state.input == output.state for state in group.state)
        )
        total = None
        if output.kind in ("scalar", "folded"):
            total = self._total(
                position, value, output.how, f"buffers of output {position}"
            )
        for worker in owners:
            yield worker, total or by_worker.get(worker, every[-1])

    def _settle(self, group: int) -> Op:
        """A group's buffers after the step, at its first owner."""
        if group in self.settled:
            return self.settled[group]
        after = {w: new for (g, w), new in self.step.buffers.items() if g == group}
        workers = sorted(after)
        owner = self.groups[group].owners[0]
        before = Weights(self.step.weight_inputs[group], owner)
        specs, _ = self.step.specs(before)
        how = self._rules(group, workers) if len(workers) > 1 else ()
        jobs = self.step.jobs
        forward = jobs.at[self.groups[group].stages[0], Direction.FORWARD]
        last = jobs.worker[jobs.find(forward, self.microbatches - 1)]
        left = [after[worker] for worker in workers]
        args = (how, workers.index(last), before, *left)
        task = f"buffers {group}"
        line = self._make(ops.merge_buffers, args, specs, owner, task)
        return self.settled.setdefault(group, line)

    def _rules(self, group: int, workers: list[int]) -> tuple[str, ...]:
        """What becomes of each buffer that several workers wrote, by what writes it
        or as the user says; an error, if neither says it."""
        rules = []
        for state, spec in zip(
            self.groups[group].state,
            of_call(self.step.weight_inputs[group])["specs"],
            strict=True,
        ):
            name, write = state.name, self.step.facts.writes[state.input]
            how = self.request.buffers.get(name, write.how)
            if how is None:
                raise _scattered(name, write, self.groups[group].stages, workers)
            check_one_writer(self.request, write, name, how, spec.dtype)
            if how == "mean" and not spec.dtype.is_floating_point:
                raise PlanError(
                    f"backend(buffers={{{name!r}: 'mean'}}): it is {spec}, of which "
                    "there is no mean; give 'sum' or 'last'"
                )
            rules.append(how)
        return tuple(rules)

    def _made(self, value: fx.Node) -> list[JobOutput | Op]:
        """A value of each microbatch; an input that is returned comes from worker 0."""
        every = range(self.microbatches)
        if self._is_joint(value):
            return [JobOutput(value, 0)]
        if value.op != "placeholder":
            return [JobOutput(value, b) for b in every]
        specs, task = of_call(value)["specs"], f"rows {value.name}"
        count = self.microbatches
        return [
            self._make(ops.rows, (value, b, count, *dims(value)), specs, 0, task)
            for b in every
        ]

    def _is_joint(self, value: fx.Node) -> bool:
        """Whether a value is made once, for the whole batch."""
        return self.step.maker.get(value) in self.step.jobs.joint

    def _input_gradient(self, what: str, values: list[fx.Node]) -> list[JobOutput | Op]:
        """The gradient of each microbatch of an input, summed over its readers."""
        gradients: list[JobOutput | Op] = []
        for b in range(self.microbatches):
            parts = tuple(JobOutput(*resolve(value, b)) for value in values)
            if len(parts) == 1:
                gradients += parts
                continue
            worker = self.step.worker(parts[0])
            specs, _ = self.step.specs(parts[0])
            gradients.append(self._make(ops.add, parts, specs, worker, f"{what}, {b}"))
        return gradients

    def _gather(self, what: str, values: list[JobOutput | Op]) -> Parts:
        """A bundle of a value's microbatches from each worker that makes some."""
        if what not in self.gathered:
            by_worker: dict[int, list[tuple[int, JobOutput | Op]]] = {}
            for b, value in enumerate(values):
                by_worker.setdefault(self.step.worker(value), []).append((b, value))
            self.gathered[what] = []
            for worker, members in by_worker.items():
                held = tuple(value for _, value in members)
                specs = tuple(s for v in held for s in self.step.specs(v)[0])
                whole = self._make(ops.bundle, held, specs, worker, f"gather {what}")
                self.gathered[what].append((tuple(b for b, _ in members), whole))
        return self.gathered[what]

    def _make(
        self, target: Any, args: tuple[Any, ...], specs: Specs, worker: int, task: str
    ) -> Op:
        name = task.replace(" ", "_").replace(",", "")
        line = Op(worker, task, self.end, target, args, specs, name)
        self.new_lines.append(line)
        return line


def _scattered(
    name: str, write: Write, stages: tuple[int, ...], workers: list[int]
) -> PlanError:
    """What to say of a buffer whose writes no one can put together."""
    numbers = ", ".join(map(str, workers))
    return PlanError(
        f"F of stage {stages[0]} writes into {name}, at\n  {write.where}\n"
        f"and workers {numbers} run it: a microbatch would not see what those on other "
        "workers wrote; take a schedule in which one worker runs F of a stage, as in "
        "schedules.gpipe, or say what the workers' values become: "
        f"backend(buffers={{{name!r}: 'mean'}}), 'sum' (of what was added) or 'last' "
        "(the last microbatch's)"
    )
