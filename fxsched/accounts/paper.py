"""Steps of stages without a model: what a plan's passes make of so many bytes.

A stage's F reads its weights and what the stages before it make, and saves `held` bytes
for B; B gives gradients of what F read, and of the weights, unless W gives these. The
same passes as for a model then say what is sent, added up, copied and renewed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import networkx as nx
import torch
from torch import fx, nn

from ..clock.activations import credits
from ..clock.jobs import Jobs, weight_owners
from ..clock.memory import Memory, Peaks, worker_totals
from ..clock.stage_record import GroupBytes
from ..clock.timeline import Timeline
from ..clock.values import Made, made_for_jobs
from ..ir import joint
from ..ir.facts import FACTS, Facts
from ..ir.garbage import no_collection
from ..ir.graphs import Group, Role, Specs, State
from ..ir.lazy import lazy_module
from ..ir.meta import note_call, of_call
from ..ir.request import Request
from ..ir.step import Step
from ..jobs.job import Direction
from ..jobs.schedule import Schedule
from ..passes.step import ORDERED
from .held import held_bytes

FORWARD, BACKWARD, WEIGHT, _ = Direction


class Size(NamedTuple):
    """In the place of a tensor's Spec: the bytes alone."""

    bytes: float
    dtype: torch.dtype | None = None

    @property
    def shape(self) -> tuple[int]:
        """As many elements as bytes."""
        return (int(self.bytes),)

    @property
    def stride(self) -> tuple[int]:
        """Of that shape."""
        return (1,)

    def run(self, elements: int) -> Size:
        """So many of the elements."""
        return self._replace(bytes=elements)


@no_collection()
def paper_step(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    timeline: Timeline,
    prefetch: int = 1,
    kept: float = 1.0,
    hosts: tuple[tuple[int, ...], ...] = (),
) -> Step:
    """The step of jobs in the order of a timeline, with all messages.

    prefetch: the weights of how many further jobs a worker asks others for.
    kept: the share of activations that is still there between B and W.
    hosts: the workers of each host; () for one host.
    """
    paper = _Paper(schedule, stages, timeline.jobs, kept)
    every = schedule.update_every if timeline.jobs.updates else None
    jobs = timeline.jobs
    room = {
        jobs.job(f): jobs.job(last) for f, last in credits(schedule, timeline).items()
    }
    step = Step(paper.graph(), timeline, room, every=every)
    request = Request(schedule, prefetch=prefetch, moments=paper.moments(), hosts=hosts)
    for fill in ORDERED:
        step = fill(step, request)
    return step


def state_bytes(step: Step) -> dict[int, int]:
    """Bytes of the optimizer's state in a step on paper, by the weight's position."""
    data = step.facts.stages.nodes
    seen: dict[int, int] = {}  # the first group of each stage has all of it
    for group in step.facts.groups:
        if group.trained[0]:
            seen.setdefault(group.stages[0], group.state[0].input)
    return {position: data[s].get("state", 0) for s, position in seen.items()}


def worker_memory(
    schedule: Schedule, stages: nx.DiGraph[int], timeline: Timeline, kept: float = 1.0
) -> list[Peaks]:
    """The most that each worker holds of stages that say what they take; kept: see
    paper_step."""
    step = paper_step(schedule, stages, timeline, kept=kept)
    return held_bytes(step, state_bytes(step))


def held_memory(
    schedule: Schedule, stages: nx.DiGraph[int], timeline: Timeline, kept: float = 1.0
) -> list[Memory]:
    """What each worker holds when that is most; by kind where there are updates."""
    plain = schedule.update_every is None and not timeline.jobs.saved
    if plain or not timeline.complete:
        return worker_totals(schedule, stages, timeline, kept)
    found = worker_memory(schedule, stages, timeline, kept)
    return [peaks.at_once for peaks in found]


@dataclass
class _Group:
    """A group of weights as stages describe it; stages: those that read it."""

    number: int
    bytes: GroupBytes
    stages: list[int]


class _Paper:
    """The graph of stages: a call for each kind of job, and what it gives."""

    def __init__(
        self, schedule: Schedule, stages: nx.DiGraph[int], jobs: Jobs, kept: float
    ) -> None:
        self.schedule, self.stages, self.jobs = schedule, stages, jobs
        self.microbatches = range(jobs.microbatches)
        self.calls = fx.Graph()
        self.read_by: dict[int, list[int]] = {s: [] for s in stages}  # groups
        self.owners = weight_owners(jobs)
        self.groups = self._groups()
        self.inputs = {g: self._weights(g) for g in self.groups}
        self.makes: list[list[Made]] = [[] for _ in jobs.preds]  # by kind
        for made in made_for_jobs(jobs, stages, kept):
            self.makes[made.kind].append(made)
        self.reads: list[list[fx.Node]] = [[] for _ in jobs.preds]
        self.sums: dict[int, list[fx.Node]] = {}

    def graph(self) -> fx.GraphModule:
        for kind in range(len(self.jobs.preds)):
            self._call(kind)
        sums = {str(g): nodes for g, nodes in sorted(self.sums.items())}
        self.calls.output({"outputs": (), "state": {}, "groups": sums, "inputs": {}})
        calls = self.calls.find_nodes(op="call_module")
        modules = dict.fromkeys((str(each.target) for each in calls), nn.Module())
        gm = lazy_module(modules, self.calls, "Paper")
        groups = tuple(self._group(group) for group in self.groups.values())
        gm.meta[FACTS] = Facts((), {}, None, stages=self.stages, groups=groups, loss=0)
        return gm

    def moments(self) -> dict[int, Specs]:
        """Bytes of what the optimizer averages with weights, by their positions."""
        return {
            2 * group.number: _specs(self.stages.nodes[group.stages[0]]["moments"])
            for group in self.groups.values()
            if "moments" in self.stages.nodes[group.stages[0]]
        }

    # Weights

    def _groups(self) -> dict[int, _Group]:
        """The groups of weights by their new numbers, which count from 0."""
        found: dict[int, _Group] = {}
        for stage in sorted(self.stages):
            for each in _read_groups(self.stages, stage):
                known = found.setdefault(each.number, _Group(len(found), each, []))
                known.stages.append(stage)
                self.read_by[stage].append(known.number)
        return {group.number: group for group in found.values()}

    def _group(self, group: _Group) -> Group:
        number, stage = group.number, group.stages[0]
        owners = self.owners[stage]
        trained = number in self.sums
        updater = self.schedule.updater(stage) if trained else None
        if updater is not None:
            owners = sorted({*owners, updater})
        state = State(2 * number, Role.PARAMETER, f"weights of stage {stage}")
        rest = State(2 * number + 1, Role.BUFFER, f"buffers of stage {stage}")
        return Group(
            (state, rest),
            tuple(owners),
            tuple(group.stages),
            (trained, False),
            tuple(sorted(s for s in group.stages if (s, BACKWARD) in self.jobs.at)),
            updater=updater,
        )

    def _weights(self, number: int) -> fx.Node:
        node = self.calls.placeholder(f"weights_{number}")
        size = self.groups[number].bytes
        specs = (*_specs(size.trained), *_specs(size.bytes - size.trained))
        note_call(node, group=number, specs=specs)
        return node

    # Calls

    def _call(self, kind: int) -> None:
        stage, direction = self.jobs.kinds[kind]
        reads = self.stages.nodes[stage].get("reads", (FORWARD, BACKWARD))
        groups = self.read_by[stage] if direction in reads else ()
        args = tuple(map(self.inputs.__getitem__, groups)), tuple(self.reads[kind])
        name = f"{direction.name.lower()}_{stage}"
        call = self.calls.create_node("call_module", name, args)
        size = self.stages.nodes[stage].get("temporary", 0.0)
        note_call(call, stage=stage, direction=direction, draw=None, temporary=size)
        for made in self.makes[kind]:
            node = self._out(call, made)
            for reader in made.readers:
                self.reads[reader] += self._in(reader, made, node)
        if direction is (WEIGHT if (stage, WEIGHT) in self.jobs.at else BACKWARD):
            for number in self.read_by[stage]:
                size = self.groups[number].bytes
                if size.bytes and not size.trained:  # frozen
                    continue
                node = self._value(call, size.gradients)
                of_call(node)["group"] = number
                self.sums.setdefault(number, []).append(node)

    def _value(self, call: fx.Node, size: float) -> fx.Node:
        node = self.calls.call_function(operator.getitem, (call, len(call.users)))
        of_call(node)["specs"] = _specs(size)
        return node

    def _out(self, call: fx.Node, made: Made) -> fx.Node:
        """What a job gives to others: a global-batch one to those of microbatches, each
        of them has its own rows, or all have the same."""

        def one() -> fx.Node:
            node = self._value(call, made.bytes)
            size = made.bytes if made.own or made.whole else 0.0  # `held` has the rest
            note_call(node, held=size, received=size)
            return node

        joint_kinds = self.jobs.joint
        if made.kind not in joint_kinds or joint_kinds.issuperset(made.readers):
            return one()
        if made.whole:
            parts = [one()] * len(self.microbatches)
        else:
            parts = [one() for _ in self.microbatches]
        return self.calls.call_function(joint.each, tuple(parts))

    def _in(self, reader: int, made: Made, value: fx.Node) -> Iterator[fx.Node]:
        """How a job reads what another gives: a global-batch one reads that of all
        microbatches, or the sum of gradients of what all of them read."""
        if reader not in self.jobs.joint or made.kind in self.jobs.joint:
            yield value
        elif made.whole and self.jobs.kinds[made.kind][1] is BACKWARD:
            total = self.calls.call_function(joint.total, (value,))
            of_call(total)["specs"] = of_call(value)["specs"]
            yield total
        else:
            for b in self.microbatches:
                yield self.calls.call_function(joint.of, (value, b))


def _specs(size: float) -> Specs:
    return cast(Specs, (Size(size),))


def _read_groups(stages: nx.DiGraph[int], stage: int) -> tuple[GroupBytes, ...]:
    """The groups that a stage reads; one of its own, where nothing says so."""
    data = stages.nodes[stage]
    whole = data.get("weights", 0.0)
    gradients = data.get("gradients", whole / 2)
    own = GroupBytes(-1 - stage, whole - gradients, whole - gradients, gradients)
    groups: tuple[GroupBytes, ...] = data.get("groups", (own,))
    return groups
