"""Puts together what the user gets: outputs, gradients and new buffers."""

from __future__ import annotations

from typing import Any

from torch import fx

from .. import ops
from ..graphs import Group, Output, Specs, make
from ..request import Request

Parts = list[tuple[tuple[int, ...], fx.Node]]  # microbatches, and their bundle


def collect_results(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """Joins outputs, sums gradients and averages buffers of all workers.

    before: job_1F0; loss_0 = job_1F0[0]                             # worker 1
            job_1F1; loss_1 = job_1F1[0]                             # worker 1
    after:  bundle = bundle(loss_0, loss_1)                          # worker 1
            output_0 = total(2, 0.5, ((0, 1), bundle))               # worker 1
            gradients_0 = reduce(sum_0, sum_0_1)                     # an owner
            return {"0": {"outputs": (output_0,), "groups": {"0": gradients_0}, ..}, ..}

    The graph then returns, for each worker, its share of the results: outputs if it
    hands them to the user, gradients and buffers of what it keeps. If B runs in
    backward(), outputs and buffers go to the workers' pause nodes instead.
    """
    _Collection(gm, request).run()
    gm.graph.lint()
    gm.recompile()
    return gm


class _Collection:
    def __init__(self, gm: fx.GraphModule, request: Request) -> None:
        self.gm, self.graph, self.request = gm, gm.graph, request
        self.microbatches = request.schedule.microbatches
        self.workers = range(request.schedule.workers)
        self.readers = self.workers if request.readers is None else request.readers
        self.groups: list[Group] = gm.meta["groups"]
        self.wanted: dict[str, Any] = gm.meta["results"]
        self.end = max(gm.meta["n"].values(), default=0)  # after all jobs
        self.gathered: dict[str, Parts] = {}

    def run(self) -> None:
        pauses: dict[int, fx.Node] = self.gm.meta["pauses"]
        self._reduce()
        end = self.graph.output_node()
        with self.graph.inserting_before(pauses.get(0, end)):
            called = self._of_call()
        for worker, pause in pauses.items():
            pause.args = (called[worker],)
        final = {w: {} for w in self.workers} if pauses else called
        with self.graph.inserting_before(end):
            for worker, own in self._of_backward().items():
                final[worker] = final[worker] | own
        end.args = ({str(worker): own for worker, own in final.items()},)

    def _reduce(self) -> None:
        """Sums each group at one owner, right after the last job that adds to it."""
        last = self._last_nodes()
        self.reduced: dict[int, fx.Node] = {}
        for group, sums in self.gm.meta["sums"].items():
            owners = self.groups[group].owners
            root = owners[group % len(owners)]  # spread over the owners
            parts = tuple(sums[worker] for worker in sorted(sums))
            self.reduced[group] = parts[0]
            if len(parts) == 1 and root in sums:
                continue
            with self.graph.inserting_after(last[group]):
                total = make(
                    self.graph,
                    ops.reduce,
                    parts,
                    parts[0].meta["specs"],
                    root,
                    f"reduce {group}",
                    last[group].meta["n"],
                    name=f"gradients_{group}",
                )
            total.meta["group"] = group
            self.reduced[group] = total

    def _last_nodes(self) -> dict[int, fx.Node]:
        """For each group the last node of the last B, or W, that adds to it."""
        stages: dict[int, list[int]] = {}
        for group, gradients in self.wanted["groups"].items():
            for node in gradients:
                stages.setdefault(node.meta["stage"], []).append(int(group))
        task = {}
        for job in self.gm.meta["jobs"]:
            if job.direction is self.request.schedule.release:
                task.update(dict.fromkeys(stages.get(job.stage, ()), str(job)))
        ends = {node.meta.get("task"): node for node in self.graph.nodes}
        return {group: ends[job] for group, job in task.items()}

    def _of_call(self) -> dict[int, dict[str, Any]]:
        """Outputs on the workers that hand them out, buffers on their owners."""
        outputs: list[Output] = self.gm.meta["outputs"]
        own: dict[int, dict[str, Any]] = {
            w: {"outputs": (), "state": {}} for w in self.workers
        }
        for position, (output, value) in enumerate(
            zip(outputs, self.wanted["outputs"], strict=True)
        ):
            nodes: dict[int, Any] = {}
            if output.kind == "constant":
                nodes = dict.fromkeys(self.readers, output.constant)
            elif output.kind == "scalar":
                total = self._total(position, value, output.differentiable)
                nodes = dict.fromkeys(self.readers, total)
            else:
                parts = self._gather(f"output {position}", self._made(value))
                nodes = self._joined(parts, output.dim, f"output {position}")
            for worker, node in nodes.items():
                own[worker]["outputs"] += (node,)
        for group in sorted(map(int, self.wanted["state"])):
            new = self._average(group)
            for worker in self.groups[group].owners:
                own[worker]["state"][str(group)] = new
        return own

    def _of_backward(self) -> dict[int, dict[str, Any]]:
        """Gradients of weights on their owners, of inputs on the readers of outputs."""
        own: dict[int, dict[str, Any]] = {
            w: {"groups": {}, "inputs": {}} for w in self.workers
        }
        for group, total in sorted(self.reduced.items()):
            for worker in self.groups[group].owners:
                own[worker]["groups"][str(group)] = total
        for key, values in self.wanted["inputs"].items():
            what = f"gradient of input {key}"
            parts = self._gather(what, self._input_gradient(what, values))
            for worker, node in self._joined(parts, 0, what).items():
                own[worker]["inputs"][key] = node
        return own

    def _total(self, position: int, value: fx.Node, is_loss: bool) -> fx.Node:
        mean = self.request.loss_reduction == "mean" or not is_loss
        scale = 1.0 / self.microbatches if mean else 1.0
        parts = self._gather(f"output {position}", self._made(value))
        root = parts[0][1].meta["worker"]
        args = (self.microbatches, scale, *parts)
        return self._make(
            ops.total, args, value.meta["specs"], root, f"output {position}"
        )

    def _joined(self, parts: Parts, dim: int | None, what: str) -> dict[int, fx.Node]:
        args = (self.microbatches, dim, *parts)
        return {w: self._make(ops.collect, args, (), w, what) for w in self.readers}

    def _average(self, group: int) -> fx.Node:
        """A group's buffers after the step, at its first owner."""
        found: dict[tuple[int, int], fx.Node] = self.gm.meta["written"]
        after = {w: node for (g, w), node in found.items() if g == group}
        (before,) = (
            n
            for n in self.graph.find_nodes(op="placeholder")
            if n.meta.get("group") == group
        )
        args = (before, *(after[worker] for worker in sorted(after)))
        owner = self.groups[group].owners[0]
        return self._make(
            ops.average, args, before.meta["specs"], owner, f"buffers {group}"
        )

    def _made(self, value: fx.Node) -> list[fx.Node]:
        """A value of each microbatch; an input that is returned comes from worker 0."""
        if value.op != "placeholder":
            return [self.gm.meta["made"][value, b] for b in range(self.microbatches)]
        whole, specs = self.gm.meta["given"][value], value.meta["specs"]
        return [
            self._make(
                ops.rows, (whole, b, self.microbatches), specs, 0, f"rows {value.name}"
            )
            for b in range(self.microbatches)
        ]

    def _input_gradient(self, what: str, values: list[fx.Node]) -> list[fx.Node]:
        """The gradient of each microbatch of an input, summed over its readers."""
        nodes = []
        for b in range(self.microbatches):
            parts = tuple(self.gm.meta["made"][value, b] for value in values)
            node = parts[0]
            if len(parts) > 1:
                worker, specs = node.meta["worker"], node.meta["specs"]
                node = self._make(ops.add, parts, specs, worker, f"{what}, {b}")
            nodes.append(node)
        return nodes

    def _gather(self, what: str, nodes: list[fx.Node]) -> Parts:
        """A bundle of a value's microbatches from each worker that makes some."""
        if what not in self.gathered:
            found: dict[int, list[tuple[int, fx.Node]]] = {}
            for b, node in enumerate(nodes):
                found.setdefault(node.meta["worker"], []).append((b, node))
            self.gathered[what] = []
            for worker, members in found.items():
                held = tuple(node for _, node in members)
                specs = tuple(s for node in held for s in node.meta["specs"])
                whole = self._make(ops.bundle, held, specs, worker, f"gather {what}")
                self.gathered[what].append((tuple(b for b, _ in members), whole))
        return self.gathered[what]

    def _make(
        self, target: Any, args: tuple[Any, ...], specs: Specs, worker: int, task: str
    ) -> fx.Node:
        name = task.replace(" ", "_").replace(",", "")
        return make(self.graph, target, args, specs, worker, task, self.end, name)
