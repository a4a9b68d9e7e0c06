"""What a worker's program is made of: tasks, and the values that it receives.

A program is cut into tasks, the nodes of one job or of one other piece of work. Where B
runs in backward(), a pause parts it into two phases.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..ir import ops
from ..ir.graphs import arguments
from ..ir.meta import of_call
from ..jobs.job import Job
from ..transport.wire_format import AllReduce, Parcel


@dataclass
class Task:
    """One piece of work: what it runs, and what must be there first."""

    name: str
    n: int
    nodes: list[fx.Node]
    needs: list[int] = field(default_factory=list)  # slots that come from elsewhere
    makes: list[int] = field(default_factory=list)
    job: Job | None = None
    pause: fx.Node | None = None

    @property
    def posts(self) -> Iterator[int]:
        """Tags of receives that it posts when it begins."""
        for node in self.nodes:
            yield from of_call(node).get("posts", ())

    @property
    def aside(self) -> int:
        """The lane beside the worker's jobs that it runs in; 0 among the jobs."""
        return max((of_call(node).get("aside", 0) for node in self.nodes), default=0)


@dataclass(frozen=True)
class Receive:
    """A value that another worker sends: its place among those, and its slot.

    lane: receives of one hold up each other; where updates are in order of arrival,
        each sender has one.
    """

    parcel: Parcel
    position: int
    slot: int
    phase: int
    lane: int


class TaskProgram:
    """A worker's fx program, read once: its tasks, by phase, and what it receives.

    receives: in the program's order. lanes: the same, by lane. fetches: those of
        weights, each task's together, in the order of the tasks that need them first,
        which are the fetchers.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.slots = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.receives: list[Receive] = []
        self.lanes: dict[int, list[Receive]] = {}
        self.phases: list[list[Task]] = [[]]
        self._read()
        self.receive_at = {receive.slot: receive for receive in self.receives}
        self.fetches: list[list[Receive]] = []
        self.fetchers: list[Task] = []
        self._order_fetches()

    def _read(self) -> None:
        tasks: dict[tuple[int, str], Task] = {}
        notes = self.gm.graph.find_nodes(op="call_function", target=ops.note)
        for node in self.gm.graph.nodes:
            phase = len(self.phases) - 1
            if node.op in ("placeholder", "output"):
                continue
            if node.target in (ops.recv, ops.fetch):
                parcel = Parcel(
                    node.kwargs["source"],
                    node.kwargs["tag"],
                    of_call(node)["specs"],
                    of_call(node)["bundle"],
                    node.target is ops.fetch,
                )
                position = len(self.receives)
                lane = parcel.peer if notes else 0
                receive = Receive(parcel, position, self.slots[node], phase, lane)
                self.receives.append(receive)
                self.lanes.setdefault(lane, []).append(receive)
                continue
            name = of_call(node)["task"]
            if (phase, name) not in tasks:
                task = Task(name, of_call(node)["n"], [])
                tasks[phase, name] = task
                self.phases[-1].append(task)
            tasks[phase, name].nodes.append(node)
            tasks[phase, name].job = of_call(node).get("job", tasks[phase, name].job)
            if node.target is ops.pause:
                tasks[phase, name].pause = node
                self.phases.append([])
        for task in tasks.values():
            self._link(task)
        results = self.gm.graph.output_node().all_input_nodes
        needs = [self.slots[n] for n in results if n.op != "placeholder"]
        self.phases[-1].append(Task("output", sys.maxsize, [], needs))

    def _order_fetches(self) -> None:
        seen: set[int] = set()
        for task in (task for phase in self.phases for task in phase):
            new = [
                receive
                for slot in task.needs
                if (receive := self.receive_at.get(slot)) is not None
                and receive.parcel.weights
                and slot not in seen
            ]
            if new:
                self.fetches.append(new)
                self.fetchers.append(task)
                seen.update(receive.slot for receive in new)

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


def sent(node: fx.Node) -> Parcel:
    """What a send node sends."""
    (value,) = arguments(node)
    weights = value.op == "placeholder" or "group" in of_call(node)
    to: Any = node.kwargs["to"]
    tag: Any = node.kwargs["tag"]
    bundle = weights or of_call(value)["bundle"]
    whole = _made_of(value).target in (ops.reduce, ops.cast)
    whole = whole and not of_call(value).get("aside")
    return Parcel(
        to, tag, of_call(value)["specs"], bundle, weights, outlives_step=whole
    )


def added_up(node: fx.Node) -> AllReduce:
    """What an all_reduce adds up."""
    _, place, others = arguments(node)
    workers = [peer for peer, *_ in others]
    workers.insert(place, of_call(node)["worker"])
    _, sent, _ = others[0]
    tag = sent - place * len(others)  # the first of all
    return AllReduce(tuple(workers), tag, of_call(node)["specs"])


def _made_of(node: fx.Node) -> fx.Node:
    """What a node of a user's pass was computed from, if from one value alone."""
    if not of_call(node).get("own"):
        return node
    sources = set(map(_made_of, node.all_input_nodes))
    return sources.pop() if len(sources) == 1 else node
