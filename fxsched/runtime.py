"""Runs one worker's program over an endpoint.

A program is cut into tasks, the nodes of one job or of one other piece of work, and
each task becomes a Python function over a list of values. "static" runs the tasks in
the program's order; "dynamic" runs, of those whose inputs are there, the one with the
smallest n.
"""

from __future__ import annotations

import heapq
import queue
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from . import ops
from .eventloop import Event
from .graphs import Specs, arguments, result
from .jobs import Job
from .transport import WATCHERS, Aborted, Endpoint

WINDOW = 4  # receives that are asked for ahead of need under order="static"


@dataclass
class Task:
    """One piece of work: what it runs, and what must be there first."""

    name: str
    n: int
    nodes: list[fx.Node]
    run: Callable[[list[Any], Endpoint], None]
    needs: list[int] = field(default_factory=list)  # slots that come from elsewhere
    makes: list[int] = field(default_factory=list)
    job: Job | None = None
    pause: fx.Node | None = None


@dataclass(frozen=True)
class Receive:
    """A value that another worker sends: where from, what it looks like, its slot."""

    position: int
    tag: int
    source: int
    specs: Specs
    bundle: bool
    slot: int
    phase: int


class Program:
    """A worker's fx program, made ready to run any number of times."""

    def __init__(self, gm: fx.GraphModule, order: str) -> None:
        self.gm, self.order = gm, order
        self.slots = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.receives: list[Receive] = []
        self.phases: list[list[Task]] = [[]]
        self._read()
        self.receive_at = {receive.slot: receive for receive in self.receives}
        self.readers = self._count_readers()

    def _read(self) -> None:
        tasks: dict[tuple[int, str], Task] = {}
        for node in self.gm.graph.nodes:
            phase = len(self.phases) - 1
            if node.op in ("placeholder", "output"):
                continue
            if node.target in (ops.recv, ops.fetch):
                self.receives.append(
                    Receive(
                        len(self.receives),
                        node.kwargs["tag"],
                        node.kwargs["source"],
                        node.meta["specs"],
                        node.meta["bundle"],
                        self.slots[node],
                        phase,
                    )
                )
                continue
            name = node.meta["task"]
            if (phase, name) not in tasks:
                task = Task(name, node.meta["n"], [], _nothing)
                tasks[phase, name] = task
                self.phases[-1].append(task)
            tasks[phase, name].nodes.append(node)
            tasks[phase, name].job = node.meta.get("job", tasks[phase, name].job)
            if node.target is ops.pause:
                tasks[phase, name].pause = node
                self.phases.append([])
        for task in tasks.values():
            self._link(task)
        results = self.gm.graph.output_node().all_input_nodes
        needs = [self.slots[n] for n in results if n.op != "placeholder"]
        self.phases[-1].append(Task("output", sys.maxsize, [], _nothing, needs))

    def _link(self, task: Task) -> None:
        inside = {self.slots[n] for n in task.nodes}
        read = dict.fromkeys(
            self.slots[p]
            for n in task.nodes
            if n.target is not ops.free
            for p in n.all_input_nodes
            if p.op != "placeholder"
        )
        task.needs = [slot for slot in read if slot not in inside]
        task.makes = sorted(inside)
        task.run = _compile(self.gm, task, self.slots, self.order == "static")

    def _count_readers(self) -> dict[int, int]:
        """How many tasks read each value, where "dynamic" can't know the last."""
        count: dict[int, int] = {}
        for phase in self.phases:
            for task in phase:
                for slot in task.needs:
                    count[slot] = count.get(slot, 0) + 1
        for value in self.gm.graph.output_node().all_input_nodes:
            count[self.slots[value]] = count.get(self.slots[value], 0) + 1
        return count


class Run:
    """One step of a program: its values, and how far it has come.

    events: the jobs that ran, with times of time.perf_counter, if `record`.
    """

    def __init__(
        self,
        program: Program,
        worker: int,
        inputs: dict[str, Any],
        endpoint: Endpoint,
        record: bool = False,
    ) -> None:
        self.program, self.worker, self.endpoint = program, worker, endpoint
        self.record = record
        self.events: list[Event] = []
        self.values: list[Any] = [None] * len(program.slots)
        for node in program.gm.graph.find_nodes(op="placeholder"):
            self.values[program.slots[node]] = inputs[node.name]
        self.phase = 0
        self.asked = 0  # receives posted so far
        self.readers = dict(program.readers)
        self.coming = dict(program.receive_at)  # not received yet, by slot

    def advance(self, tangents: dict[int, Tensor] | None = None) -> dict[str, Any]:
        """Runs up to the pause, or to the end; returns what the program gives there."""
        tasks = self.program.phases[self.phase]
        if tangents is not None:
            (pause,) = (t.pause for t in self.program.phases[self.phase - 1] if t.pause)
            self.values[self.program.slots[pause]] = tangents
        run = self._static if self.program.order == "static" else self._dynamic
        with ExitStack() as modes:  # stage graphs hold all casts already
            modes.enter_context(torch.no_grad())
            for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                modes.enter_context(torch.autocast(kind, enabled=False))
            run(tasks)
        self.endpoint.finish()
        self.phase += 1
        if self.phase < len(self.program.phases):
            (pause,) = (t.pause for t in tasks if t.pause)
            results = arguments(pause)[0]
        else:
            results = result(self.program.gm)
        found: dict[str, Any] = fx.map_arg(
            results, lambda n: self.values[self.program.slots[n]]
        )
        return found

    def _static(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            for slot in task.needs:
                if slot in self.coming:
                    receive = self.coming.pop(slot)
                    self._ask(receive.position + 1 + WINDOW)
                    self.values[slot] = self.endpoint.take(receive.tag)
            self._execute(task)
        self._ask(len(self.program.receives))
        for slot, receive in self._coming().items():  # first read after the pause
            self.values[slot] = self.endpoint.take(receive.tag)
            del self.coming[slot]

    def _coming(self) -> dict[int, Receive]:
        """What this phase still has to receive, by slot."""
        return {s: r for s, r in self.coming.items() if r.phase == self.phase}

    def _ask(self, end: int) -> None:
        """Posts this phase's receives in the program's order, up to the end-th."""
        receives = self.program.receives
        for receive in receives[self.asked : end]:
            if receive.phase != self.phase:
                return
            self.endpoint.expect(
                receive.source, receive.tag, receive.specs, receive.bundle
            )
            self.asked += 1

    def _execute(self, task: Task) -> None:
        start = time.perf_counter()
        try:
            task.run(self.values, self.endpoint)
        except Exception as error:
            error.add_note(f"fxsched: while running {task.name}")
            raise
        if self.record and task.job is not None:
            end = time.perf_counter()
            self.events.append(Event(task.job, self.worker, start, end))

    def _dynamic(self, tasks: Sequence[Task]) -> None:
        arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        by_tag = {r.tag: r for r in self.program.receives}
        missing, waiting = self._missing(tasks)
        ready = [(t.n, i) for i, t in enumerate(tasks) if not missing[i]]
        heapq.heapify(ready)

        def ask(count: int) -> None:
            before = self.asked
            self._ask(before + count)
            for receive in self.program.receives[before : self.asked]:
                self.endpoint.watch(receive.tag, arrived)

        def there(slots: Sequence[int]) -> None:
            for slot in slots:
                for i in waiting.pop(slot, ()):
                    missing[i] -= 1
                    if not missing[i]:
                        heapq.heappush(ready, (tasks[i].n, i))

        ask(WATCHERS)
        left, incoming = len(tasks), len(self._coming())
        while left or incoming:
            if incoming and (not ready or not arrived.empty()):
                tag = arrived.get()
                if tag < 0:
                    raise Aborted
                receive = by_tag[tag]
                self.values[receive.slot] = self.endpoint.take(tag)
                del self.coming[receive.slot]
                there([receive.slot])
                incoming -= 1
                ask(1)
            else:
                task = tasks[heapq.heappop(ready)[1]]
                self._execute(task)
                left -= 1
                self._release(task)
                there(task.makes)

    def _missing(self, tasks: Sequence[Task]) -> tuple[list[int], dict[int, list[int]]]:
        """For each task how many values it waits for; for each value, the tasks."""
        position = {slot for task in tasks for slot in task.makes}
        waiting: dict[int, list[int]] = {}
        missing = []
        for i, task in enumerate(tasks):
            slots = [s for s in task.needs if s in position or s in self.coming]
            if task.pause is not None:  # the call ends when all of its tasks have run
                slots = sorted({*slots, *position} - set(task.makes))
            missing.append(len(slots))
            for slot in slots:
                waiting.setdefault(slot, []).append(i)
        return missing, waiting

    def _release(self, task: Task) -> None:
        if task.pause is not None:  # its values are about to be handed out
            return
        for slot in task.needs:
            self.readers[slot] -= 1
            if not self.readers[slot]:
                self.values[slot] = None
        for slot in task.makes:
            if not self.readers.get(slot):
                self.values[slot] = None


def _nothing(values: list[Any], endpoint: Endpoint) -> None:
    pass


def _compile(
    gm: fx.GraphModule, task: Task, slots: dict[fx.Node, int], frees: bool
) -> Callable[[list[Any], Endpoint], None]:
    """A task as a Python function: v[12] = call_3((v[0],), (v[5],), None)."""
    names: dict[str, Any] = {}
    lines = []
    for node in task.nodes:
        if node.target is ops.free:
            if frees:
                lines += [f"v[{slots[value]}] = None" for value in node.all_input_nodes]
        elif node.target is ops.send:
            value = _render(node.args[0], slots, names)
            to, tag = node.kwargs["to"], node.kwargs["tag"]
            lines.append(f"endpoint.send({value}, {to}, {tag})")
        elif node.target is not ops.pause:
            lines.append(_line(gm, node, slots, names))
    body = "\n    ".join(lines or ["pass"])
    code = f"def run(v, endpoint):\n    {body}\n"
    exec(compile(code, f"<fxsched {task.name}>", "exec"), names)
    run: Callable[[list[Any], Endpoint], None] = names["run"]
    return run


def _line(
    gm: fx.GraphModule, node: fx.Node, slots: dict[fx.Node, int], names: dict[str, Any]
) -> str:
    if node.op == "call_module":
        target: Any = gm.get_submodule(str(node.target))
    else:
        target = node.target
    name = f"call_{slots[node]}"
    names[name] = target
    args = [_render(arg, slots, names) for arg in node.args]
    args += [f"{k}={_render(v, slots, names)}" for k, v in node.kwargs.items()]
    return f"v[{slots[node]}] = {name}({', '.join(args)})"


def _render(value: Any, slots: dict[fx.Node, int], names: dict[str, Any]) -> str:
    """An argument as Python text; what isn't a literal gets a name."""
    if isinstance(value, fx.Node):
        return f"v[{slots[value]}]"
    if isinstance(value, (tuple, list)):
        return "(" + "".join(_render(v, slots, names) + ", " for v in value) + ")"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    name = f"constant_{len(names)}"
    names[name] = value
    return name
