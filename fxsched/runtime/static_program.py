"""A program as one function that runs top to bottom, and single tasks as functions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx

from ..ir import ops
from ..ir.graphs import arguments, result
from ..ir.meta import of_call
from ..ir.step import SERVED
from ..transport.wire_format import AllReduce, Parcel
from .device_graphs import DeviceGraphs
from .profiler_ranges import close_range, open_range
from .python_source import Expression, PythonSource, compiled, text_of
from .tasks import Receive, Task, TaskProgram, added_up, sent

Steps = Generator[dict[str, Any], dict[int, Tensor] | None, None]


class Straight:
    """A program in its planned order, as a generator that yields at the pause and at
    the end what the program gives there.

    prefetch: for how many tasks ahead weights are asked for.
    ordered: whether sends and receives stay where they stand in the program.
    lanes: the lanes beside the program that it needs, by number.
    run(given, send, expect, take, clock, log, *lanes): given has the inputs by name;
    log(job, start, end) is called after each job, if `record`, with what clock() gave,
    and a profiler gets its name; a lane is Lane.call of one: lane(task, function,
    *args).
    """

    def __init__(
        self,
        program: TaskProgram,
        record: bool,
        prefetch: int = 1,
        ordered: bool = False,
        graphs: DeviceGraphs | None = None,
    ) -> None:
        self.program, self.record, self.prefetch = program, record, prefetch
        self.ordered, self.stood = ordered, 0  # receives that stand before this place
        self.source = PythonSource(program.gm, graphs)
        self.env: dict[fx.Node, Expression] = {}
        self.nodes = list(program.gm.graph.nodes)
        self.by_tag = {receive.parcel.tag: receive for receive in program.receives}
        self.posted: set[int] = set()  # slots of receives
        self.fetched = self.used = 0  # tasks' fetches asked for, and taken, so far
        self.batch = {r.slot: i for i, each in enumerate(program.fetches) for r in each}
        self.taken: set[int] = set()
        self.later: dict[fx.Node, tuple[str, int]] = {}  # futures of tasks beside
        self.kept: dict[fx.Node, str] = {}  # tensors of losses, by their bundle
        self.sums: dict[fx.Node, AllReduce] = {}  # begun, and not taken
        inputs = program.gm.graph.find_nodes(op="placeholder")
        self.weights_stay = all(node.name != "optimizer" for node in inputs)
        for node in inputs:
            self.env[node] = new = self.source.make(f"given[{node.name!r}]")
            if "group" in of_call(node):
                self.source.weights.add(new)
        for number, phase in enumerate(program.phases):
            self._phase(number, phase)
        lines = self.source.written()
        self.tasks = [task for _, task in lines]
        ranges = {"open_range": open_range, "close_range": close_range}
        names = {**self.source.names, **ranges}
        names["empty"] = torch.empty
        tasks = [task for phase in program.phases for task in phase]
        self.lanes = sorted({task.aside for task in tasks} - {0})
        lanes = [f"lane_{number}" for number in self.lanes]
        head = ", ".join(["given, send, expect, take, clock, log", *lanes])
        self.file, self.run = compiled("program", head, lines, names)

    def _phase(self, number: int, tasks: Sequence[Task]) -> None:
        (self._in_order if self.ordered else self._by_task)(number, tasks)
        if number == len(self.program.phases) - 1:
            self._finish(number)
            end = self._results(result(self.program.gm))
            self.source.line(f"yield {end}")

    def _by_task(self, number: int, tasks: Sequence[Task]) -> None:
        source = self.source
        self._ask(number, self.used + self.prefetch)
        for task in self._served_early(tasks):
            source.task = task.name
            for tag in task.posts:
                if tag in self.by_tag:  # which a pass of the user's may have dropped
                    self._expect(self.by_tag[tag])
            if task.aside:
                self._beside(number, task)
                continue
            for slot in task.needs:
                receive = self.program.receive_at.get(slot)
                if receive is None:
                    continue
                if slot in self.batch:
                    self.used = max(self.used, self.batch[slot] + 1)
                    self._ask(number, self.used + self.prefetch)
                if slot not in self.taken:
                    self._take(receive)
            self._run(number, task, task.nodes)

    def _in_order(self, number: int, tasks: Sequence[Task]) -> None:
        """Runs the nodes of all tasks where they stand."""
        of = {node: task for task in tasks for node in task.nodes}
        slots = self.program.slots
        for task, nodes in groupby(sorted(of, key=slots.__getitem__), of.__getitem__):
            self.source.task = task.name
            self._run(number, task, [*nodes])

    def _post(self, node: fx.Node) -> None:
        """Posts the receives that stand before a node, and takes what it reads."""
        receives, slots = self.program.receives, self.program.slots
        for receive in receives[self.stood :]:
            if receive.slot > slots[node]:
                break
            self._expect(receive)
            self.stood += 1
        for read in node.all_input_nodes:
            found = self.program.receive_at.get(slots[read])
            if found is not None and found.slot not in self.taken:
                self._take(found)
            self._take_sum(read)

    def _take_sum(self, node: fx.Node) -> None:
        """Takes what an all_reduce adds up, if it isn't."""
        if (added := self.sums.pop(node, None)) is not None:
            self.env[node] = self.source.make(f"take({self.source.parcel(added)})")

    def _run(self, number: int, task: Task, nodes: Sequence[fx.Node]) -> None:
        """Runs nodes of a task, of which the first say when it ran."""
        source, timed = self.source, self.record and task.job is not None
        timed = timed and nodes[0] is task.nodes[0]
        for node in nodes[: self.ordered]:
            self._post(node)
        if timed:
            source.line(f"ranged = open_range({str(task.job)!r})")
            source.line("began = clock()")
        for node in nodes:
            if self.ordered:
                self._post(node)
            self._node(number, node)
        if timed:
            source.line(f"log({source.name(task.job)}, began, clock())")
            source.line("close_range(ranged)")

    def _served_early(self, tasks: Sequence[Task]) -> list[Task]:
        """Sends of weights that are there from the start come SERVED jobs earlier, so
        that who asks for them doesn't wait for this worker's jobs."""
        placed, jobs = list[tuple[int, bool, Task]](), 0
        for task in tasks:
            early = self.weights_stay and _serves(task)
            placed.append((max(0, jobs - SERVED * early), not early, task))
            jobs += task.job is not None
        return [task for _, _, task in sorted(placed, key=lambda each: each[:2])]

    def _beside(self, number: int, task: Task) -> None:
        """Has a task run beside the program, as a function of its own that takes what
        it receives; what other tasks read of it they wait for."""
        inner, env = PythonSource(self.program.gm), dict[fx.Node, Expression]()
        args, given = list[str](), list[fx.Node]()
        for slot in task.needs:
            node, receive = self.nodes[slot], self.program.receive_at.get(slot)
            if receive is not None and slot not in self.taken:
                if slot in self.batch:
                    self._ask(number, self.batch[slot] + 1)
                self._expect(receive)
                self.taken.add(slot)
                env[node] = inner.make(f"take({inner.parcel(receive.parcel)})")
                given.append(node)
                continue
            name = f"a{len(args)}"
            if node in self.later:
                future, place = self.later[node]
                env[node] = inner.make(f"{name}.result()[{place}]")
                args.append(future)
            else:
                env[node] = name
                args.append(text_of(self.env[node]))
        for node in task.nodes:
            if node.target is ops.send:
                value = text_of(inner.express(node.args[0], env))
                inner.line(f"send({value}, {inner.parcel(sent(node))})")
            elif node.target is not ops.free:
                env[node] = inner.node(node, env)
                given.append(node)
        own = {*task.nodes}
        given = [node for node in given if not own.issuperset(node.users)]
        inner.line(f"return {text_of(tuple(env[node] for node in given))}")
        params = ", ".join(["send", "take", *(f"a{i}" for i in range(len(args)))])
        _, run = compiled(task.name, params, inner.written(), inner.names)
        name, call = self.source.name(task.name), self.source.name(run)
        new = self.source.make(
            f"lane_{task.aside}({', '.join([name, call, 'send', 'take', *args])})"
        )
        for place, node in enumerate(given):
            self.later[node] = new, place
            self.env[node] = f"{new}.result()[{place}]"

    def _node(self, number: int, node: fx.Node) -> None:
        source, env = self.source, self.env
        if node.target is ops.send:
            value = text_of(source.express(node.args[0], env))
            source.line(f"send({value}, {source.parcel(sent(node))})")
        elif node.target is ops.all_reduce:
            value = text_of(source.express(node.args[0], env))
            self.sums[node] = added_up(node)
            source.line(f"send({value}, {source.parcel(self.sums[node])})")
        elif node.target is ops.pause:
            self._finish(number)  # what is first read after the pause too
            results = self._results(arguments(node)[0])
            env[node] = new = source.variable()
            source.line(f"{new} = yield {results}")
        elif node in self.kept:
            env[node] = source.make(f"{self.kept[node]}.unbind()")
        elif node.target not in (ops.free, ops.wait):
            env[node] = source.node(node, env, whole=True)
            for bundle in filter(_is_scalars, node.users):
                self._keep(node, bundle)

    def _keep(self, node: fx.Node, bundle: fx.Node) -> None:
        """Puts a loss at its place among all that are bundled at the end. Each of them
        in memory of its own would split a large block that malloc has free."""
        source = self.source
        if bundle not in self.kept:
            spec = of_call(node)["specs"][0]
            like = f"{len(bundle.args)}, dtype={source.name(spec.dtype)}"
            new = source.make(f"empty({like}, device={str(spec.device)!r})")
            self.kept[bundle] = new
        for place, each in enumerate(bundle.args):
            if each is node:
                text = f"{self.kept[bundle]}[{place}].copy_({text_of(self.env[node])})"
                source.line(text)

    def _ask(self, phase: int, fetches: int) -> None:
        """Asks for the fetches of so many tasks."""
        batches = self.program.fetches
        while self.fetched < min(fetches, len(batches)):
            if batches[self.fetched][0].phase != phase:
                break
            for receive in batches[self.fetched]:
                self._expect(receive)
            self.fetched += 1

    def _expect(self, receive: Receive) -> None:
        """Posts a receive, if it isn't."""
        if receive.slot not in self.posted:
            self.posted.add(receive.slot)
            self.source.line(f"expect({self.source.parcel(receive.parcel)})")

    def _take(self, receive: Receive) -> None:
        self._expect(receive)
        taken = self.source.make(f"take({self.source.parcel(receive.parcel)})")
        self.env[self.nodes[receive.slot]] = taken
        self.taken.add(receive.slot)

    def _finish(self, phase: int) -> None:
        """Takes what is left of a phase's receives."""
        self._ask(phase, len(self.program.fetches))
        for receive in self.program.receives:
            if receive.phase == phase and receive.slot not in self.taken:
                self._take(receive)
        for node in list(self.sums):
            self._take_sum(node)

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


def _is_scalars(node: fx.Node) -> bool:
    """Whether a node bundles several 0-d tensors of one type that jobs of this worker
    give, as losses are."""
    specs = set(of_call(node).get("specs", ()))
    one = len(specs) == 1 and not next(iter(specs)).shape
    own = all(each.target is operator.getitem for each in node.all_input_nodes)
    return node.target is ops.bundle and one and own and len(node.args) > 1


def _serves(task: Task) -> bool:
    """Whether all that a task does is to send inputs of the program."""
    return bool(task.nodes) and all(
        node.target is ops.send and node.all_input_nodes[0].op == "placeholder"
        for node in task.nodes
    )


def task_function(
    program: TaskProgram,
    task: Task,
    shared: set[fx.Node],
    graphs: DeviceGraphs | None = None,
) -> Callable[[list[Any], Callable[[Any, Parcel], None]], None]:
    """A task as a function of all values, by slot, and of send.

    shared: values that other tasks read, too; the function leaves them in their slots.
    """
    source, slots = PythonSource(program.gm, graphs), program.slots
    env: dict[fx.Node, Expression] = {}
    for node in task.nodes:
        for read in node.all_input_nodes:
            env.setdefault(read, f"v[{slots[read]}]")
            if "group" in of_call(read) and read.op == "placeholder":
                source.weights.add(f"v[{slots[read]}]")
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
