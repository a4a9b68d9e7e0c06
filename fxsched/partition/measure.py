"""Measures how long each node of a traced graph takes, to replace estimates."""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import networkx as nx
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..clock.timeline import Event
from ..ir import joint, ops
from ..ir.graphs import REGION_ENTERS, REGION_EXITS, Role, tensors
from ..ir.meta import of_node
from ..jobs.job import Direction, PlanError, whole_stage
from .costs import Operands, Work

FORWARD, BACKWARD, WEIGHT, _ = Direction


class Times(NamedTuple):
    """Seconds of F and of B."""

    forward: float
    backward: float

    @staticmethod
    def of(work: Work) -> Times:
        """Those of a node's work."""
        return Times(work.forward, work.backward)

    def over(self, other: Times) -> Times:
        """The ratio to others; 1 where these take no time."""
        return Times(
            *(a / b if b > 0 else 1.0 for a, b in zip(self, other, strict=True))
        )

    def scaled(self, ratio: Times) -> Times:
        """Each time multiplied by its ratio."""
        return Times(*(a * b for a, b in zip(self, ratio, strict=True)))

    def once(self, again: float, forward: float) -> Times:
        """Those of jobs without what B computes again of F: so many of its planned
        seconds, at the pace of F."""
        pace = self.forward / (forward or 1.0)
        return Times(self.forward, max(0.0, self.backward - again * pace))


@dataclass(frozen=True)
class Profile:
    """The measured times of a model's nodes, and the estimates for the same nodes.

    Times are for one microbatch, in seconds, by the node's module, operation, and
    number in the module. For other shapes, a plan scales its estimates by measured /
    estimated.
    """

    measured: dict[str, Times]
    estimated: dict[str, Times]

    def __str__(self) -> str:
        f, b = (sum(t[i] for t in self.measured.values()) for i in (0, 1))
        return f"profile of {len(self.measured)} nodes: F {f:.3g} s, B {b:.3g} s"

    def apply(self, gm: fx.GraphModule) -> None:
        """Replaces the estimates of a traced graph by measured times.

        Raises PlanError if most of the graph's work is in nodes that were not measured.
        """
        nodes = [node for node in gm.graph.nodes if "work" in of_node(node)]
        known = [node for node in nodes if of_node(node)["key"] in self.measured]
        work = {n: sum(Times.of(of_node(n)["work"])) for n in nodes}
        if 2 * sum(work[n] for n in known) < sum(work.values()):
            raise PlanError(
                "the profile is of another model: it has times for less than half of "
                "this model's work; make a profile with fxsched.profile(model, "
                "*inputs) on this model"
            )
        whole = _total(self.measured.values()).over(_total(self.estimated.values()))
        for node in nodes:
            key, old = of_node(node)["key"], of_node(node)["work"]
            of_node(node)["estimated"] = Times.of(old)
            ratio = whole
            if key in self.measured:
                ratio = self.measured[key].over(self.estimated[key])
            forward, backward = of_node(node)["estimated"].scaled(ratio)
            of_node(node)["work"] = old._replace(forward=forward, backward=backward)


def _total(times: Iterable[Times]) -> Times:
    return Times(*map(sum, zip((0.0, 0.0), *times, strict=True)))


class Known(NamedTuple):
    """What a plan knows of a node: its stage (None: copied to those that read it), and
    its times, as estimated and as the plan has them."""

    stage: int | None
    estimated: Times
    planned: Times


def known_nodes(nodes: Sequence[fx.Node]) -> dict[str, Known]:
    """Nodes of a traced graph with stages, by the names that a Profile has for them."""
    profile = {}
    for node in nodes:
        if "work" in of_node(node):
            planned = Times.of(of_node(node)["work"])
            estimated = of_node(node).get("estimated", planned)
            key = of_node(node)["key"]
            profile[key] = Known(of_node(node).get("stage"), estimated, planned)
    return profile


def fit_profile(
    nodes: Mapping[str, Known],
    stages: nx.DiGraph[int],
    steps: Sequence[Sequence[Event]],
) -> Profile:
    """The planned times of nodes, scaled stage by stage so that F and B of a stage take
    what they took in steps, at the median, but for what B computes again of F."""
    taken: dict[tuple[int, Direction], list[float]] = {}
    for event in (event for events in steps for event in events):
        kind = event.job.stage, event.job.direction
        taken.setdefault(kind, []).append(event.end - event.start)
    once: dict[int, list[Times]] = {}  # of its pieces, by the stage of the model
    for piece in {stage for stage, _ in taken}:
        f, *b = (
            statistics.median(taken.get((piece, d), [0.0]))
            for d in (FORWARD, BACKWARD, WEIGHT)
        )
        data = stages.nodes[piece]
        times = Times(f, sum(b)).once(data.get("again", 0.0), data["forward"])
        once.setdefault(whole_stage(piece), []).append(times)
    ratios: dict[int | None, Times] = {None: Times(1.0, 1.0)}
    for stage, each in once.items():
        planned = _total(n.planned for n in nodes.values() if n.stage == stage)
        f, backward = _total(each)
        ratios[stage] = Times(f, backward or planned.backward).over(planned)
    return Profile(
        {key: node.planned.scaled(ratios[node.stage]) for key, node in nodes.items()},
        {key: node.estimated for key, node in nodes.items()},
    )


def measure(
    gm: fx.GraphModule, inputs: Sequence[Any], microbatches: int, repeats: int
) -> Profile:
    """Runs a traced microbatch on real inputs, node by node, so many times.

    A node's times are the medians over all runs of it and of those like it: blocks that
    are the same get the same times, whatever the machine did meanwhile.
    The model's parameters and buffers stay as they are.
    """
    runs = []
    for _ in range(repeats + 1):  # the first one warms up
        runs.append(_TimedPass(gm, inputs, microbatches).run())
    nodes = [n for n in gm.graph.nodes if n in runs[0]]
    taken: dict[str, list[Times]] = {}
    for node in nodes:
        taken.setdefault(_kind(node), []).extend(run[node] for run in runs[1:])
    medians = {
        kind: Times(*(statistics.median(t[i] for t in times) for i in (0, 1)))
        for kind, times in taken.items()
    }
    return Profile(
        {of_node(n)["key"]: medians[_kind(n)] for n in nodes},
        {of_node(n)["key"]: Times.of(of_node(n)["work"]) for n in nodes},
    )


def _kind(node: fx.Node) -> str:
    """What a node does, and to what: with which shapes, strides and types, and which of
    them want gradients."""

    def describe(read: fx.Node) -> Any:
        value = of_node(read).get("val")
        if not isinstance(value, Tensor):
            return value
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad

    values = fx.map_arg((node.args, node.kwargs), describe)
    return f"{node.op} {node.target} {values}"


class _TimedPass:
    """F of all nodes of a traced graph, then B of all, from the last to the first, so
    that weights and saved values come from as far as in training."""

    def __init__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], microbatches: int
    ) -> None:
        self.gm, self.inputs, self.microbatches = gm, inputs, microbatches
        self.interpreter = fx.Interpreter(gm)
        self.values: dict[fx.Node, Any] = {}
        self.ran: dict[fx.Node, tuple[Operands, Any]] = {}  # F of what has a B
        values = (of_node(node).get("val") for node in gm.graph.nodes)
        self.devices = {t.device for t in tensors([*values])} - {torch.device("cpu")}

    def now(self) -> float:
        """The time, once the devices have done what they were given."""
        for device in self.devices:
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    def run(self) -> dict[fx.Node, Times]:
        forward = {}
        last = {p: n for n in self.gm.graph.nodes for p in n.all_input_nodes}
        with torch.no_grad():
            for node in self.gm.graph.nodes:
                if node.op == "placeholder":
                    self.values[node] = self.input_of(node)
                elif node.op == "get_attr":
                    path = operator.attrgetter(str(node.target))
                    self.values[node] = path(self.gm)
                elif node.target in (*REGION_ENTERS, *REGION_EXITS):
                    self.region(node)
                elif node.target in (joint.join, joint.part):
                    self.values[node] = self.rows_of(node)
                elif node.op != "output":
                    forward[node] = self.call(node)
                for read in node.all_input_nodes:
                    if last[read] is node:
                        del self.values[read]
        backward = {node: self.backward(node) for node in reversed([*self.ran])}
        return {n: Times(f, backward.get(n, 0.0)) for n, f in forward.items()}

    def input_of(self, node: fx.Node) -> Tensor:
        value: Tensor = self.inputs[of_node(node)["index"]]
        if of_node(node)["role"] is Role.BATCH:
            value = ops.rows(value, 0, self.microbatches, of_node(node)["dim"])
        is_parameter = of_node(node)["role"] is Role.PARAMETER
        return value.detach() if is_parameter else value.detach().clone()

    def rows_of(self, node: fx.Node) -> Tensor:
        """What goes into a stage of the whole batch, or comes out of it: of one
        microbatch as often as there are, which takes as long as of all of them."""
        (value, *how), _ = self.arguments(node)
        if node.target is joint.part:
            dim, count = how
            return ops.rows(value, 0, count, dim)
        what, dim, count = how
        whole = torch.cat([value] * count, dim) if what == "rows" else value
        return whole * count if what == "sum" else whole

    def region(self, node: fx.Node) -> None:
        if node.target is torch._C._set_grad_enabled:
            self.values[node] = None  # F has no gradients here, B has its own
            return
        target: Any = node.target
        self.values[node] = target(*self.arguments(node)[0])

    def arguments(self, node: fx.Node) -> tuple[Any, dict[str, Any]]:
        arguments: tuple[Any, dict[str, Any]] = fx.map_arg(
            (node.args, node.kwargs), self.values.__getitem__
        )
        return arguments

    def call(self, node: fx.Node) -> float:
        """Seconds of a node's F."""
        run = getattr(self.interpreter, node.op)
        args, kwargs = self.arguments(node)
        if not of_node(node)["work"].backward:
            begin = self.now()
            self.values[node] = run(node.target, args, kwargs)
            return self.now() - begin
        wanted = {
            n: self.values[n].detach().requires_grad_(of_node(n)["val"].requires_grad)
            for n in node.all_input_nodes
            if isinstance(of_node(n).get("val"), Tensor)
        }
        own = fx.map_arg(
            (node.args, node.kwargs), lambda n: wanted.get(n, self.values[n])
        )
        operands = Operands(*own, written=bool(of_node(node).get("mutates")))
        with torch.enable_grad():
            begin = self.now()
            result = run(node.target, operands.args, operands.kwargs)
            seconds = self.now() - begin
        self.ran[node] = operands, result
        if operands.written:
            result = run(node.target, args, kwargs)
        self.values[node] = pytree.tree_map_only(Tensor, Tensor.detach, result)
        return seconds

    def backward(self, node: fx.Node) -> float:
        """Seconds of a node's B."""
        operands, result = self.ran.pop(node)
        compute = operands.backward(result)
        begin = self.now()
        compute()
        return self.now() - begin
