"""Writes every job of every worker into one graph, in the global order."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .. import ops
from ..graphs import Spec, arguments, make, result
from ..jobs import Direction, Job, Placement
from ..request import Request

TOKEN = Spec((0,), (1,), torch.float32, torch.device("cpu"))


def unroll_jobs(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """One call per job on its worker, and the sums of gradients of each worker.

    before: forward_0 = self.forward_0((weights_0,), (x,), None)     # of any microbatch
    after:  x_0 = rows(x, 0, 2)                                      # worker 0
            job_0F0 = self.forward_0((weights_0,), (x_0,), None)
            x_1 = rows(x, 1, 2)                                      # worker 1
            job_0F1 = self.forward_0((weights_0,), (x_1,), None)

    Every node carries `worker`, `task` (the job or other piece of work that it belongs
    to) and `n`. Values may still be read on workers other than their own.
    """
    return _Unroll(gm, request).run()


class _Unroll:
    def __init__(self, gm: fx.GraphModule, request: Request) -> None:
        self.gm, self.request = gm, request
        self.microbatches = request.schedule.microbatches
        self.placements: dict[Job, Placement] = gm.meta["placements"]
        self.graph = fx.Graph()
        self.new: dict[tuple[fx.Node, int], fx.Node] = {}  # of a node, by microbatch
        self.given: dict[fx.Node, fx.Node] = {}  # placeholders
        self.parts: dict[tuple[fx.Node, int, int], fx.Node] = {}  # rows on a worker
        self.state: dict[tuple[int, int], fx.Node] = {}  # of a group, on a worker
        self.sums: dict[int, dict[int, fx.Node]] = {}  # of a group, by worker
        self.tokens: dict[Job, fx.Node] = {}
        self.pauses: dict[int, fx.Node] = {}
        self.results: dict[str, Any] = result(gm)
        self.before, self.after = _by_call(gm.graph)
        self.calls = {
            (node.meta["stage"], node.meta["direction"]): node
            for node in gm.graph.nodes
            if node.op == "call_module"
        }

    def run(self) -> fx.GraphModule:
        jobs: list[Job] = self.gm.meta["jobs"]
        credits: dict[Job, Job] = self.gm.meta["credits"]
        self.creditors = set(credits.values())
        for node in self.gm.graph.find_nodes(op="placeholder"):
            if "tangent" not in node.meta:
                self.given[node] = self.graph.placeholder(node.name)
                self.given[node].meta = dict(node.meta)
        if any(call.meta["draw"] is not None for call in self.calls.values()):
            self.seed = self.graph.placeholder("seed")
            self.seed.meta["specs"] = ()
        late = self.gm.meta["loss"] is None  # B runs in backward()
        for job in jobs:
            if late and job.direction is Direction.BACKWARD and not self.pauses:
                for worker in range(self.request.schedule.workers):
                    where = (worker, "pause", self.gm.meta["n"][job])
                    self.pauses[worker] = make(self.graph, ops.pause, ({},), (), *where)
            self._job(job, credits.get(job))
        self.graph.output({})
        result = fx.GraphModule(self.gm, self.graph, "Job")
        result.meta = dict(self.gm.meta)
        result.meta.update(
            results=self.results,
            made=self.new,
            given=self.given,
            sums=self.sums,
            written=self.state,
            pauses=self.pauses,
        )
        return result

    def _job(self, job: Job, credit: Job | None) -> None:
        call = self.calls[job.stage, job.direction]
        where = (self.placements[job].compute, str(job), self.gm.meta["n"][job])
        if credit is not None:
            make(self.graph, ops.wait, (self.tokens[credit],), (), *where)
        for node in self.before.get(call, ()):
            self._copy(node, job, where)
        weights, *rest, _ = arguments(call)
        state = tuple(self._state(w, job) for w in weights)
        values = fx.map_arg(tuple(rest), lambda n: self._value(n, job, where))
        seed = None
        if call.meta["draw"] is not None:
            args = (self.seed, call.meta["draw"], job.microbatch)
            seed = make(self.graph, ops.seed, args, (), *where)
        target = str(call.target)
        new = make(
            self.graph, target, (state, *values, seed), (), *where, name=f"job_{job}"
        )
        new.meta["job"] = job
        self.new[call, job.microbatch] = new
        for node in self.after.get(call, ()):
            self._copy(node, job, where)
        if job in self.creditors:
            self.tokens[job] = make(
                self.graph, ops.credit, (new,), (TOKEN,), *where, name=f"credit_{job}"
            )

    def _copy(self, node: fx.Node, job: Job, where: tuple[int, str, int]) -> None:
        args = fx.map_arg(node.args, lambda n: self._value(n, job, where))
        specs = node.meta["specs"]
        name = f"{node.name}_{job.microbatch}"
        new = make(self.graph, node.target, args, specs, *where, name=name)
        self.new[node, job.microbatch] = new
        new.meta["bundle"] = node.meta.get("bundle", False)
        group = node.meta.get("group")
        if group is None:
            return
        worker = where[0]
        new.meta["group"] = group
        if job.direction is Direction.FORWARD:
            self.state[group, worker] = new
            return
        sums = self.sums.setdefault(group, {})
        if worker in sums:
            args = (sums[worker], new)
            new = make(
                self.graph,
                ops.accumulate,
                args,
                specs,
                *where,
                name=f"sum_{group}_of_{job}",
            )
        sums[worker] = new

    def _state(self, weights: fx.Node, job: Job) -> fx.Node:
        """A group as this job finds it: F sees what earlier F here wrote into it."""
        worker = self.placements[job].compute
        key = (weights.meta["group"], worker)
        if job.direction is Direction.FORWARD and key in self.state:
            return self.state[key]
        return self.given[weights]

    def _value(self, node: fx.Node, job: Job, where: tuple[int, str, int]) -> fx.Node:
        b = job.microbatch
        if node.op != "placeholder":
            return self.new[node, b]
        worker = where[0]
        key = (node, b, worker)
        if key not in self.parts:
            if "tangent" in node.meta:
                self.parts[key] = self._tangent(node, b, where)
            else:
                self.parts[key] = make(
                    self.graph,
                    ops.rows,
                    (self.given[node], b, self.microbatches),
                    node.meta["specs"],
                    *where,
                    name=f"{node.name}_{b}",
                )
                self.parts[key].meta["local"] = True
        return self.parts[key]

    def _tangent(self, node: fx.Node, b: int, where: tuple[int, str, int]) -> fx.Node:
        position = node.meta["tangent"]
        output = self.gm.meta["outputs"][position]
        args = (self.pauses[where[0]], position)
        whole = make(self.graph, operator.getitem, args, node.meta["specs"], *where)
        if output.kind == "rows":
            cut = (whole, b, self.microbatches, output.dim)
            return make(self.graph, ops.rows, cut, node.meta["specs"], *where)
        mean = self.request.loss_reduction == "mean" and output.kind == "scalar"
        scale = 1.0 / self.microbatches if mean else 1.0
        return make(self.graph, ops.share, (whole, scale), node.meta["specs"], *where)


def _by_call(
    graph: fx.Graph,
) -> tuple[dict[fx.Node, list[fx.Node]], dict[fx.Node, list[fx.Node]]]:
    """The nodes that run just before and just after each call.

    Parts of a call's result come after it. A sum of gradients comes before the call
    that reads it, or, if there's none, after the last call that it reads from.
    """
    before: dict[fx.Node, list[fx.Node]] = {}
    after: dict[fx.Node, list[fx.Node]] = {}
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            made[node] = node
        elif node.op == "call_function":
            reader = _reading_call(node)
            if node.target is operator.getitem or reader is None:
                made[node] = next(made[p] for p in node.all_input_nodes)
                after.setdefault(made[node], []).append(node)
            else:
                before.setdefault(reader, []).append(node)
                made[node] = reader
    return before, after


def _reading_call(node: fx.Node) -> fx.Node | None:
    calls = [user for user in node.users if user.op == "call_module"]
    if calls:
        return calls[0]
    found = [_reading_call(u) for u in node.users if u.op == "call_function"]
    return next((call for call in found if call is not None), None)
