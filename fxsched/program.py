"""What a worker's program is made of: tasks, and the values that it receives.

A program is cut into tasks, the nodes of one job or of one other piece of work. Where B
runs in backward(), a pause parts it into two phases.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from torch import fx

from . import ops
from .graphs import Specs
from .jobs import Job


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
    """A worker's fx program, read once: its tasks, by phase, and what it receives."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.slots = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.receives: list[Receive] = []
        self.phases: list[list[Task]] = [[]]
        self._read()
        self.receive_at = {receive.slot: receive for receive in self.receives}

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
                task = Task(name, node.meta["n"], [])
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
        self.phases[-1].append(Task("output", sys.maxsize, [], needs))

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
