"""A program as one function that runs top to bottom, and single tasks as functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch import Tensor, fx

from ..ir import ops
from ..ir.graphs import arguments, result
from ..transport.wire_format import Parcel
from .profiler_ranges import close_range, open_range
from .python_source import Expression, PythonSource, compiled, text_of
from .tasks import Receive, Task, TaskProgram, sent

WINDOW = 4  # receives that are asked for ahead of need, besides weights
Steps = Generator[dict[str, Any], dict[int, Tensor] | None, None]


class Straight:
    """A program in its planned order, as a generator that yields at the pause and at
    the end what the program gives there.

    prefetch: for how many tasks ahead weights are asked for.
    run(given, send, expect, take, log): given has the inputs by name; log(job, start,
    end) is called after each job, if `record`, and a profiler gets its name.
    """

    def __init__(self, program: TaskProgram, record: bool, prefetch: int = 1) -> None:
        self.program, self.record, self.prefetch = program, record, prefetch
        self.source = PythonSource(program.gm)
        self.env: dict[fx.Node, Expression] = {}
        self.nodes = list(program.gm.graph.nodes)
        self.asked = self.fetched = 0  # receives, and tasks' fetches, asked for so far
        self.used = 0  # tasks' fetches taken
        self.batch = {r.slot: i for i, each in enumerate(program.fetches) for r in each}
        self.taken: set[int] = set()
        for node in program.gm.graph.find_nodes(op="placeholder"):
            self.env[node] = self.source.make(f"given[{node.name!r}]")
        for number, phase in enumerate(program.phases):
            self._phase(number, phase)
        lines = self.source.written()
        self.tasks = [task for _, task in lines]
        ranges = {"open_range": open_range, "close_range": close_range}
        names = {**self.source.names, **ranges, "clock": time.perf_counter}
        head = "given, send, expect, take, log"
        self.file, self.run = compiled("program", head, lines, names)

    def _phase(self, number: int, tasks: Sequence[Task]) -> None:
        source = self.source
        self._ask(number, 0, self.used + self.prefetch)
        for task in tasks:
            source.task = task.name
            for slot in task.needs:
                receive = self.program.receive_at.get(slot)
                if receive is None or slot in self.taken:
                    continue
                batch = self.batch.get(slot)
                if batch is None:
                    self._ask(number, receive.position + 1 + WINDOW, 0)
                else:
                    self.used = batch + 1
                    self._ask(number, 0, self.used + self.prefetch)
                self._take(receive)
            timed = self.record and task.job is not None
            if timed:
                source.line(f"ranged = open_range({str(task.job)!r})")
                source.line("began = clock()")
            for node in task.nodes:
                self._node(number, node)
            if timed:
                source.line(f"log({source.name(task.job)}, began, clock())")
                source.line("close_range(ranged)")
        if number == len(self.program.phases) - 1:
            self._finish(number)
            end = self._results(result(self.program.gm))
            source.line(f"yield {end}")

    def _node(self, number: int, node: fx.Node) -> None:
        source, env = self.source, self.env
        if node.target is ops.send:
            value = text_of(source.express(node.args[0], env))
            source.line(f"send({value}, {source.parcel(sent(node))})")
        elif node.target is ops.pause:
            self._finish(number)  # what is first read after the pause too
            results = self._results(arguments(node)[0])
            env[node] = new = source.variable()
            source.line(f"{new} = yield {results}")
        elif node.target not in (ops.free, ops.wait):
            env[node] = source.node(node, env, whole=True)

    def _ask(self, phase: int, ahead: int, fetches: int) -> None:
        """Asks for this phase's receives in the program's order: up to the one at place
        `ahead`, and the fetches of so many tasks."""
        receives, batches = self.program.receives, self.program.fetches
        while self.asked < min(ahead, len(receives)):
            receive = receives[self.asked]
            if receive.phase != phase:
                break
            if not receive.parcel.weights:
                self._expect(receive)
            self.asked += 1
        while self.fetched < min(fetches, len(batches)):
            if batches[self.fetched][0].phase != phase:
                break
            for receive in batches[self.fetched]:
                self._expect(receive)
            self.fetched += 1

    def _expect(self, receive: Receive) -> None:
        self.source.line(f"expect({self.source.parcel(receive.parcel)})")

    def _take(self, receive: Receive) -> None:
        taken = self.source.make(f"take({self.source.parcel(receive.parcel)})")
        self.env[self.nodes[receive.slot]] = taken
        self.taken.add(receive.slot)

    def _finish(self, phase: int) -> None:
        """Takes what is left of a phase's receives."""
        left = self.program.receives
        self._ask(phase, len(left), len(self.program.fetches))
        for receive in left:
            if receive.phase == phase and receive.slot not in self.taken:
                self._take(receive)

    def _results(self, value: Any) -> str:
        if isinstance(value, dict):
            items = (f"{k!r}: {self._results(v)}" for k, v in value.items())
            return "{" + ", ".join(items) + "}"
        return text_of(self.source.express(value, self.env))

    def task_of(self, error: BaseException) -> str | None:
        """The task in which an error was raised."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self.file:
                return self.tasks[trace.tb_lineno - 2]
            trace = trace.tb_next
        return None


def task_function(
    program: TaskProgram, task: Task, shared: set[fx.Node]
) -> Callable[[list[Any], Callable[[Any, Parcel], None]], None]:
    """A task as a function of all values, by slot, and of send.

    shared: values that other tasks read, too; the function leaves them in their slots.
    """
    source, slots = PythonSource(program.gm), program.slots
    env: dict[fx.Node, Expression] = {}
    for node in task.nodes:
        for read in node.all_input_nodes:
            env.setdefault(read, f"v[{slots[read]}]")
    for node in task.nodes:
        if node.target is ops.send:
            value = text_of(source.express(node.args[0], env))
            source.line(f"send({value}, {source.parcel(sent(node))})")
        elif node.target not in (ops.free, ops.wait, ops.pause):
            env[node] = source.node(node, env)
            if node in shared:
                source.line(f"v[{slots[node]}] = {text_of(env[node])}")
    _, run = compiled(task.name, "v, send", source.written(), source.names)
    return run
