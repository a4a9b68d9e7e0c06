"""Writes one worker's program from its lines."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from ...ir import ops
from ...ir.encodings import Codes
from ...ir.graphs import Output, arguments, dims, make
from ...ir.joint import resolve
from ...ir.meta import note_call, of_call
from ...ir.request import Request
from ...ir.step import (
    HANDS_ON,
    TOKEN,
    Credit,
    JobOutput,
    Message,
    Op,
    Step,
    Value,
    Weights,
    with_values,
)
from ...jobs.job import Job
from .finite import checked_values

# ops that the worker's optimizer carries out
STEPS = (ops.update, ops.copy, ops.correct, ops.renew, ops.note)
OPTIMIZED = (*STEPS, ops.replica, ops.take)

Where = tuple[int, str, int]  # worker, task, n


def cut_program(step: Step, request: Request, worker: int) -> fx.Graph:
    """The lines of one worker, in the global order, as a program of its own.

    before: 0F0                                                      # worker 0
            message 3: a_0 from worker 0 to worker 1
            1F0                                                      # worker 1
    after:  x_0 = rows(x, 0, 2)                                      # program 0
            job_0F0 = self.forward_0((weights_0,), (x_0,), None)
            a_0 = job_0F0[0]
            send_3 = send(a_0, to=1, tag=3)

            recv_3 = recv(source=0, tag=3)                           # program 1
            job_1F0 = self.forward_1((weights_1,), (recv_3,), None)

    A program takes the weights that its worker keeps and reads, and the inputs that
    its jobs read; it returns its share of the results. Every node carries `worker`,
    `task` (the job or other piece of work that it belongs to) and `n`.
    """
    return _ProgramWriter(step, request, worker).run()


class _ProgramWriter:
    def __init__(self, step: Step, request: Request, worker: int) -> None:
        self.step, self.request, self.worker = step, request, worker
        self.microbatches = request.schedule.microbatches
        self.graph = fx.Graph()
        self.env: dict[Value, fx.Node] = {}
        self.travelling: dict[Value, fx.Node] = {}  # what is sent of encoded values
        self.codes: dict[Value, Codes] = {}  # of those that nothing has read here
        self.parts: dict[tuple[fx.Node, int], fx.Node] = {}  # rows of the batch
        self.pause: fx.Node | None = None
        self.read: dict[fx.Node, Value] = {}  # what a job reads of others
        self.lines = step.lines_of[worker]
        self.credits = set[Value]()  # that someone waits for
        for line in self.lines:
            read = line.after if isinstance(line, Op) else (line.value,)
            self.credits.update(each for each in read if isinstance(each, Credit))

    def run(self) -> fx.Graph:
        self._placeholders()
        for line in self.lines:
            if isinstance(line, Message):
                if not line.among:
                    self._message(line)
            elif line.target is None:
                self._job(line)
            else:
                self._op(line)
        results = self.step.results[self.worker]
        self.graph.output(with_values(results, self._returned))
        for node in self.graph.find_nodes(op="placeholder"):
            if not node.users:
                self.graph.erase_node(node)
        return self.graph

    def _placeholders(self) -> None:
        for node in self.step.graph.graph.find_nodes(op="placeholder"):
            if "tangent" not in of_call(node):
                new = self.graph.placeholder(node.name)
                self.env[node] = self.env[Weights(node, self.worker)] = new
                new.meta = dict(node.meta)
        if self.request.scaled:
            self.scale = self.graph.placeholder("loss_scale")
            of_call(self.scale)["specs"] = ()
        self.optimizer: fx.Node | None = None
        if self.step.every is not None:
            self.optimizer = self.graph.placeholder("optimizer")
            of_call(self.optimizer)["specs"] = ()
        if self.step.draws:
            self.seed = self.graph.placeholder("seed")
            of_call(self.seed)["specs"] = ()

    def _message(self, message: Message) -> None:
        """This worker's end of a message."""
        if message.source == self.worker:
            self._send(message)
            return
        target = ops.fetch if message.fetches else ops.recv
        kwargs: dict[str, Any] = {"source": message.source, "tag": message.tag}
        node = self.graph.create_node(
            "call_function", target, (), kwargs, f"{target.__name__}_{message.tag}"
        )
        _, bundle = self.step.specs(message.value)
        note_call(
            node,
            n=message.n,
            task=message.task,
            specs=message.specs,
            bundle=bundle or message.codes is not None,
            worker=self.worker,
        )
        if message.fetches:
            of_call(node)["group"] = self.step.group(message)
        value = message if message.fetches else message.value
        self.env[value] = node
        if message.codes is not None:
            self.travelling[value], self.codes[value] = node, message.codes

    def _send(self, message: Message) -> None:
        value, task = message.value, message.task
        if message.aside == HANDS_ON:
            task = f"hand on {message.tag}"
        elif message.fetches:
            task = f"serve {message.tag}"
        node = self.graph.create_node(
            "call_function",
            ops.send,
            (self._as_sent(message, task),),
            {"to": message.to, "tag": message.tag},
            f"send_{message.tag}",
        )
        note_call(node, n=message.n, task=task, worker=self.worker, specs=())
        if message.aside:
            note_call(node, aside=message.aside)
        if message.fetches and not isinstance(value, Weights):
            of_call(node)["group"] = self.step.group(message)  # it sends weights

    def _as_sent(self, message: Message, task: str) -> fx.Node:
        """What a message brings. From then on, this worker's ops read what others read
        too; but weights stay exact where they are kept."""
        value, codes = message.value, message.codes
        if codes is None:
            return self.env[value]
        if value in self.travelling:
            return self.travelling[value]
        args, name = (codes, self.env[value]), f"encoded_{message.tag}"
        where = (self.worker, task, message.n)
        new = make(self.graph, ops.encode, args, message.specs, *where, name=name)
        note_call(new, own=True)
        if message.aside:
            note_call(new, aside=message.aside)
        if message.fetches:
            of_call(new)["group"] = self.step.group(message)
        else:
            self.travelling[value], self.codes[value] = new, codes
        return new

    def _read(self, value: Value, where: Where) -> fx.Node:
        """A value that a task of this worker reads; the first that does decodes it."""
        codes = self.codes.pop(value, None)
        if codes is not None:
            specs, bundle = self.step.specs(value)
            target = ops.decode if bundle else ops.decode_one
            args, name = (codes, self.travelling[value]), f"{self.env[value]}_decoded"
            new = make(self.graph, target, args, specs, *where, name=name)
            note_call(new, own=True)
            self.env[value] = new
        return self.env[value]

    def _returned(self, value: Value) -> fx.Node:
        node = self.env[value]
        task = f"decode {node}" if value in self.codes else ""
        return self._read(value, (self.worker, task, of_call(node).get("n", 0)))

    def _op(self, line: Op) -> None:
        assert line.target is not None
        where = (line.worker, line.task, line.n)
        read = (*line.args, *line.after)
        if line.target is ops.all_reduce:
            read = self._shared(line)
        args = with_values(read, lambda value: self._read(value, where))
        if line.target in OPTIMIZED:
            args = (self.optimizer, *args)
        node = make(self.graph, line.target, args, line.specs, *where, name=line.name)
        note_call(node, bundle=self.step.specs(line)[1])
        if line.group is not None:
            of_call(node)["group"] = line.group
        if line.aside:
            note_call(node, aside=line.aside)
        if line.job is not None:
            of_call(node)["job"] = line.job
        self._post(line, node)
        if line.target is ops.pause:
            self.pause = node
        if self.request.check_finite and line.target is ops.update:
            read = (line.task, (node,), ((0, str(line.name)),))
            make(self.graph, ops.finite, read, (), *where)
        self.env[line] = node

    def _shared(self, line: Op) -> tuple[Any, ...]:
        """The arguments of an all_reduce in its worker's program."""
        (workers, *parts), messages = line.args, self.step.shared[line]
        tags = {(each.source, each.to): each.tag for each in messages}
        own = self.worker
        others = tuple(
            (peer, tags[own, peer], tags[peer, own]) for peer in workers if peer != own
        )
        place = workers.index(own)
        return parts[place], place, others

    def _job(self, line: Op) -> None:
        job = line.job
        assert job is not None
        recipe = self.step.recipe(job)
        where = (line.worker, line.task, line.n)
        for token in line.after:
            make(self.graph, ops.wait, (self.env[token],), (), *where)
        call = recipe.call
        _, *rest, _ = arguments(call)
        weights, read = line.args
        kind = self.step.jobs.at[job.stage, job.direction]
        self.read = dict(zip(self.step.reads[kind], read, strict=True))
        for node in recipe.before:
            self._copy(node, job, where)
        state = tuple(self._read(value, where) for value in weights)
        values = fx.map_arg(tuple(rest), lambda n: self._value(n, job, where))
        seed = None
        if of_call(call)["draw"] is not None:
            update = self.step.round(job.microbatch)
            args = (self.seed, of_call(call)["draw"], job.microbatch, update)
            seed = make(self.graph, ops.seed, args, (), *where)
        target, args = str(call.target), (state, *values, seed)
        new = make(self.graph, target, args, (), *where, name=f"job_{job}")
        of_call(new)["job"] = job
        self._post(line, new)
        if self.request.check_finite:
            names = checked_values(recipe, self.request.training)
            read = (str(job), new, names, *args)
            make(self.graph, ops.finite, read, (), *where)
        self.env[JobOutput(call, job.microbatch)] = new
        for node in recipe.after:
            self._copy(node, job, where)
        if Credit(job) in self.credits:
            name = f"credit_{job}"
            token = make(self.graph, ops.credit, (new,), (TOKEN,), *where, name=name)
            self.env[Credit(job)] = token

    def _post(self, line: Op, node: fx.Node) -> None:
        """Notes the receives that a line's task posts."""
        if posts := self.step.posts.get(line):
            note_call(node, posts=tuple(message.tag for message in posts))

    def _copy(self, node: fx.Node, job: Job, where: Where) -> None:
        args = fx.map_arg(node.args, lambda n: self._value(n, job, where))
        if node.target is ops.loss_gradient and self.request.scaled:
            args = (*args, self.scale)
        specs = of_call(node)["specs"]
        name = f"{node.name}_{job.microbatch}"
        new = make(self.graph, node.target, args, specs, *where, name=name)
        of_call(new)["bundle"] = of_call(node).get("bundle", False)
        if "group" in of_call(node):
            of_call(new)["group"] = of_call(node)["group"]
        self.env[JobOutput(node, job.microbatch)] = new

    def _value(self, node: fx.Node, job: Job, where: Where) -> fx.Node:
        node_of, b = resolve(node, job.microbatch)
        if node_of.op != "placeholder":
            return self._read(self.read.get(node, JobOutput(node_of, b)), where)
        node = node_of
        if (node, b) not in self.parts:
            if "tangent" in of_call(node):
                part = self._tangent(node, b, where)
            else:
                args = (self.env[node], b, self.microbatches, *dims(node))
                specs, name = of_call(node)["specs"], f"{node.name}_{b}"
                part = make(self.graph, ops.rows, args, specs, *where, name=name)
            self.parts[node, b] = part
        return self.parts[node, b]

    def _tangent(self, node: fx.Node, b: int, where: Where) -> fx.Node:
        """A microbatch's part of the gradient that backward() hands in."""
        position, specs = of_call(node)["tangent"], of_call(node)["specs"]
        output = self.step.facts.outputs[position]
        args: tuple[Any, ...] = (self.pause, position)
        whole = make(self.graph, operator.getitem, args, specs, *where)
        if output.kind == "rows":
            cut = (whole, b, self.microbatches, output.dim)
            part = make(self.graph, ops.rows, cut, specs, *where)
            return (
                make(self.graph, ops.packed, (part,), specs, *where)
                if output.dim
                else part
            )
        scale = self._share_of(output, b)
        return make(self.graph, ops.share, (whole, scale), specs, *where)

    def _share_of(self, output: Output, microbatch: int) -> float:
        """How much of an output's gradient is a microbatch's."""
        if output.joint:
            return 1.0
        last = microbatch == self.microbatches - 1
        if output.how == "last":
            return 1.0 if last else 0.0
        mean = self.request.loss_reduction == "mean"
        if output.kind == "folded":
            mean = output.how == "mean"
        elif output.kind == "one":  # the same for all
            mean = True
        elif output.kind == "whole":
            mean = False
        return 1.0 / self.microbatches if mean else 1.0
