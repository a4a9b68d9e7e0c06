"""Writes every job of every worker into one graph, in the global order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .. import ops
from ..graphs import Group, Spec, arguments, result
from ..jobs import Direction, Job, Placement
from ..request import Request

FORWARD, BACKWARD = Direction
TOKEN = Spec((0,), (1,), torch.float32, torch.device("cpu"))


def unroll_jobs(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """One call per job on its worker; gradients summed per worker, results collected.

    before: forward_0 = self.forward_0((weights_0,), (x,), None)     # of any microbatch
    after:  x_0 = rows(x, 0, 2)                                      # worker 0
            job_0F0 = self.forward_0((weights_0,), (x_0,), None)
            x_1 = rows(x, 1, 2)                                      # worker 1
            job_0F1 = self.forward_0((weights_0,), (x_1,), None)

    Every node carries `worker`, `task` (the job or other piece of work that it belongs
    to) and `n`. Values may still be read on workers other than their own.
    """
    return _Unroll(gm, request).run()


Parts = list[tuple[tuple[int, ...], fx.Node]]  # microbatches, and their bundle


class _Unroll:
    def __init__(self, gm: fx.GraphModule, request: Request) -> None:
        self.gm, self.request = gm, request
        self.microbatches = request.schedule.microbatches
        self.placements: dict[Job, Placement] = gm.meta["placements"]
        self.groups: list[Group] = gm.meta["groups"]
        self.graph = fx.Graph()
        self.new: dict[
            tuple[fx.Node, int], fx.Node
        ] = {}  # of template node, microbatch
        self.given: dict[fx.Node, fx.Node] = {}  # placeholders
        self.parts: dict[tuple[fx.Node, int, int], fx.Node] = {}  # rows on a worker
        self.state: dict[tuple[int, int], fx.Node] = {}  # of a group, on a worker
        self.sums: dict[int, dict[int, fx.Node]] = {}  # of a group, by worker
        self.tokens: dict[Job, fx.Node] = {}
        self.pauses: dict[int, fx.Node] = {}
        self.results: dict[str, Any] = result(gm)
        readers = request.readers
        self.readers = range(request.schedule.workers) if readers is None else readers
        self.before, self.after = _by_call(gm.graph)
        self.calls = {
            (
                n.meta["stage"],
                FORWARD if n.target.startswith("forward") else BACKWARD,
            ): n
            for n in gm.graph.nodes
            if n.op == "call_module"
        }

    def run(self) -> fx.GraphModule:
        jobs: list[Job] = self.gm.meta["jobs"]
        credits: dict[Job, Job] = self.gm.meta["credits"]
        self.creditors = set(credits.values())
        for node in self.gm.graph.find_nodes(op="placeholder"):
            if "tangent" not in node.meta:
                self.given[node] = self.graph.placeholder(node.name)
                self.given[node].meta = dict(node.meta)
        last = self._last_backward(jobs)
        split = (
            any(j.direction is BACKWARD for j in jobs) and self.gm.meta["loss"] is None
        )
        for job in jobs:
            if split and job.direction is BACKWARD and not self.pauses:
                self._pause()
            self._job(job, credits.get(job))
            for group in last.get(job, ()):
                self._reduce(group, job)
        self.graph.output(self._finish(split))
        result = fx.GraphModule(self.gm, self.graph, "Job")
        result.meta = dict(self.gm.meta)
        return result

    def _node(
        self,
        target: Callable[..., Any] | str,
        args: tuple[Any, ...],
        specs: Sequence[Spec],
        worker: int,
        task: str,
        n: int,
        name: str | None = None,
    ) -> fx.Node:
        op = "call_module" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(op, target, args, name=name)
        node.meta.update(
            worker=worker,
            task=task,
            n=n,
            specs=tuple(specs),
            bundle=target in ops.BUNDLES,
        )
        return node

    def _job(self, job: Job, credit: Job | None) -> None:
        call = self.calls[job.stage, job.direction]
        where = (self.placements[job].compute, str(job), self.gm.meta["n"][job])
        if credit is not None:
            self._node(ops.wait, (self.tokens[credit],), (), *where)
        for node in self.before.get(call, ()):
            self._copy(node, job, where)
        weights, *rest, _ = arguments(call)
        state = tuple(self._state(w, job) for w in weights)
        values = fx.map_arg(tuple(rest), lambda n: self._value(n, job, where))
        seed = None
        if call.meta["random"]:
            if not hasattr(self, "seed"):
                self._seed_input()
            args = (self.seed, job.stage, job.microbatch)
            seed = self._node(ops.seed, args, (), *where)
        target = str(call.target)
        new = self._node(target, (state, *values, seed), (), *where, name=f"job_{job}")
        new.meta["job"] = job
        self.new[call, job.microbatch] = new
        for node in self.after.get(call, ()):
            self._copy(node, job, where)
        if job in self.creditors:
            self.tokens[job] = self._node(ops.credit, (new,), (TOKEN,), *where)

    def _seed_input(self) -> None:
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            self.seed = self.graph.placeholder("seed")
        self.seed.meta.update(seed=True, specs=())

    def _copy(self, node: fx.Node, job: Job, where: tuple[int, str, int]) -> None:
        args = fx.map_arg(node.args, lambda n: self._value(n, job, where))
        specs = node.meta["specs"]
        name = f"{node.name}_{job.microbatch}"
        new = self._node(node.target, args, specs, *where, name=name)
        self.new[node, job.microbatch] = new
        new.meta["bundle"] = node.meta.get("bundle", False)
        group = node.meta.get("group")
        if group is None:
            return
        worker = where[0]
        new.meta["group"] = group
        if job.direction is FORWARD:
            self.state[group, worker] = new
            return
        sums = self.sums.setdefault(group, {})
        if worker in sums:
            args = (sums[worker], new)
            new = self._node(ops.accumulate, args, specs, *where, name=f"sum_{group}")
        sums[worker] = new

    def _state(self, weights: fx.Node, job: Job) -> fx.Node:
        """A group as this job finds it: F sees what earlier F here wrote into it."""
        worker = self.placements[job].compute
        key = (weights.meta["group"], worker)
        if job.direction is FORWARD and key in self.state:
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
                self.parts[key] = self._node(
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
        whole = self._node(operator.getitem, args, node.meta["specs"], *where)
        if output.kind == "rows":
            cut = (whole, b, self.microbatches, output.dim)
            return self._node(ops.rows, cut, node.meta["specs"], *where)
        mean = self.request.loss_reduction == "mean" and output.kind == "scalar"
        scale = 1.0 / self.microbatches if mean else 1.0
        return self._node(ops.share, (whole, scale), node.meta["specs"], *where)

    def _last_backward(self, jobs: list[Job]) -> dict[Job, list[int]]:
        """The groups whose gradients are complete after a job."""
        last: dict[int, Job] = {}
        stages: dict[int, list[int]] = {}
        for group, nodes in self.results["groups"].items():
            for node in nodes:
                stages.setdefault(node.meta["stage"], []).append(int(group))
        for job in jobs:
            if job.direction is BACKWARD:
                for group in stages.get(job.stage, ()):
                    last[group] = job
        result: dict[Job, list[int]] = {}
        for group, job in last.items():
            result.setdefault(job, []).append(group)
        return result

    def _reduce(self, group: int, job: Job) -> None:
        """Sums a group's gradients at one owner, another one for each next group."""
        owned = self.groups[group].owners
        root = owned[group % len(owned)]
        sums = self.sums[group]
        parts = tuple(sums[worker] for worker in sorted(sums))
        n = self.gm.meta["n"][job]
        if len(parts) > 1 or root not in sums:
            task = f"reduce {group}"
            self.sums[group] = {
                root: self._node(
                    ops.reduce,
                    parts,
                    parts[0].meta["specs"],
                    root,
                    task,
                    n,
                    name=f"gradients_{group}",
                )
            }
            self.sums[group][root].meta["group"] = group

    def _collected(self, position: int, worker: int) -> Any:
        """Output `position` of the model on a worker."""
        value = self.results["outputs"][position]
        output = self.gm.meta["outputs"][position]
        if output.kind == "constant":
            return output.constant
        scale = (
            1.0 / self.microbatches if self.request.loss_reduction == "mean" else 1.0
        )
        if output.kind == "scalar":
            key = (position, -1)
            if key not in self.totals:
                parts = self._gather(position, self._made(value))
                root = parts[0][1].meta["worker"]
                self.totals[key] = self._node(
                    ops.total,
                    (self.microbatches, scale, *parts),
                    value.meta["specs"],
                    root,
                    "collect",
                    self.end,
                    name=f"output_{position}",
                )
            return self.totals[key]
        parts = self._gather(position, self._made(value))
        return self._node(
            ops.collect,
            (self.microbatches, output.dim, *parts),
            (),
            worker,
            "collect",
            self.end,
            name=f"output_{position}",
        )

    def _made(self, value: fx.Node) -> list[fx.Node]:
        """A value of each microbatch; an input that is returned comes from worker 0."""
        where = (0, "collect", self.end)
        return [
            self._value(value, Job(0, b, FORWARD), where)
            for b in range(self.microbatches)
        ]

    def _input_gradient(self, values: list[fx.Node]) -> list[fx.Node]:
        """The gradient of each microbatch of an input, summed over its readers."""
        result = []
        for b in range(self.microbatches):
            parts = tuple(self.new[value, b] for value in values)
            node = parts[0]
            if len(parts) > 1:
                worker, specs = node.meta["worker"], node.meta["specs"]
                node = self._node(ops.add, parts, specs, worker, "collect", self.end)
            result.append(node)
        return result

    def _gather(self, key: Any, nodes: list[fx.Node]) -> Parts:
        """A bundle of one value's microbatches from each worker that makes some."""
        if key in self.gathered:
            return self.gathered[key]
        found: dict[int, list[tuple[int, fx.Node]]] = {}
        for b, node in enumerate(nodes):
            found.setdefault(node.meta["worker"], []).append((b, node))
        parts = []
        for worker, members in found.items():
            held = tuple(node for _, node in members)
            specs = tuple(s for node in held for s in node.meta["specs"])
            whole = self._node(ops.bundle, held, specs, worker, "collect", self.end)
            parts.append((tuple(b for b, _ in members), whole))
        self.gathered[key] = parts
        return parts

    def _forward_results(self) -> dict[int, dict[str, Any]]:
        """What the call gives on each worker: outputs and new buffers."""
        self.totals: dict[Any, fx.Node] = {}
        self.gathered: dict[Any, Parts] = {}
        self.end = max(self.gm.meta["n"].values(), default=0)
        count = len(self.results["outputs"])
        results: dict[int, dict[str, Any]] = {
            worker: {"outputs": (), "state": {}, "groups": {}, "inputs": {}}
            for worker in range(self.request.schedule.workers)
        }
        for worker in self.readers:
            results[worker]["outputs"] = tuple(
                self._collected(position, worker) for position in range(count)
            )
        for key, value in self.results["state"].items():
            self._average(int(key), value, results)
        return results

    def _average(
        self, group: int, value: fx.Node, results: dict[int, dict[str, Any]]
    ) -> None:
        owned = self.groups[group].owners
        found = {w: node for (g, w), node in self.state.items() if g == group}
        parts = tuple(found[w] for w in sorted(found))
        before = next(
            n
            for n in self.graph.find_nodes(op="placeholder")
            if n.meta.get("group") == group
        )
        new = self._node(
            ops.average,
            (before, *parts),
            value.meta["specs"],
            owned[0],
            "collect",
            self.end,
            name=f"state_{group}",
        )
        for worker in owned:
            results[worker]["state"][str(group)] = new

    def _pause(self) -> None:
        """Ends the call on every worker, and starts backward()."""
        results = self._forward_results()
        for worker in range(self.request.schedule.workers):
            self.pauses[worker] = self._node(
                ops.pause, (results[worker],), (), worker, "pause", self.end
            )

    def _finish(self, split: bool) -> dict[str, Any]:
        """What each worker gives in the end, by worker."""
        workers = range(self.request.schedule.workers)
        if split:
            self.gathered = {}
            results: dict[int, dict[str, Any]] = {
                w: {"groups": {}, "inputs": {}} for w in workers
            }
        else:
            results = self._forward_results()
        for group, sums in sorted(self.sums.items()):
            (total,) = sums.values()
            for worker in self.groups[group].owners:
                results[worker]["groups"][str(group)] = total
        for key, values in self.results["inputs"].items():
            parts = self._gather(("input", key), self._input_gradient(values))
            for worker in self.readers:
                results[worker]["inputs"][key] = self._node(
                    ops.collect,
                    (self.microbatches, 0, *parts),
                    (),
                    worker,
                    "collect",
                    self.end,
                    name=f"gradient_{key}",
                )
        return {str(worker): result for worker, result in results.items()}


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
