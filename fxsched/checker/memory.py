"""Proves when values are there: made, freed once, and not read once something else is
in their memory.

What goes over a value's memory waits for the jobs and copies that read the value, in
any order of tasks. It need not say so of a job whose gradient the new weights come of.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import fx

from ..ir import ops
from ..ir.graphs import arguments
from ..ir.meta import of_call
from ..jobs.job import Direction, Job
from .reference import Reference
from .summary import Summary

RECEIVES = (ops.recv, ops.fetch)
# the argument in whose memory a result is; of ops.reduce a number says it
OVERWRITES: dict[Any, int] = {
    ops.accumulate: 0,
    ops.all_reduce: 0,
    ops.update: 3,
    ops.renew: 1,
    ops.take: 3,
}
COPIES = (ops.copy, ops.correct)


def is_job(node: fx.Node) -> bool:
    """Whether a node of a program is F, B or W."""
    return node.op == "call_module" and "job" in of_call(node)


def task_of(node: fx.Node) -> str:
    """The task that a node belongs to."""
    return str(of_call(node).get("task", node.name))


def order_tasks(
    nodes: Sequence[fx.Node], read: Sequence[Sequence[fx.Node]], summary: Summary
) -> dict[str, int]:
    """The position of each task, noted with what it waits for.

    A task starts once all that it reads is there: what it reads of others here must be
    made by tasks before it. read: the values that each node reads.
    """
    positions: dict[str, int] = {}
    calls = []
    for node, inputs in zip(nodes, read, strict=True):
        if node.op.startswith("call") and node.target not in RECEIVES:
            task = of_call(node)["task"]
            if task not in positions:
                positions[task] = len(positions)
            if node.target is not ops.free:
                calls.append((task, inputs))
    waits: dict[tuple[int, int], None] = {}
    for task, inputs in calls:
        position = positions[task]
        for value in inputs:
            if value.target in RECEIVES:
                tag: Any = value.kwargs["tag"]
                waits[position, tag] = None
            elif value.op != "placeholder":
                before = of_call(value)["task"]
                if before != task and positions[before] > position:
                    summary.circle = (before, task)
    summary.tasks, summary.waits = list(positions), list(waits)
    return positions


class Memory:
    """What is in memory at a node of a program, while these are gone through."""

    def __init__(
        self, rank: int, nodes: Sequence[fx.Node], reference: Reference
    ) -> None:
        self.rank, self.reference = rank, reference
        self.at = {node: i for i, node in enumerate(nodes)}
        self.there: set[fx.Node] = set()
        self.freed: set[fx.Node] = set()
        self.changed: dict[fx.Node, fx.Node] = {}  # by what went over its memory
        self.shared: dict[fx.Node, list[fx.Node]] = {}  # values in the same memory
        self.pieces: dict[fx.Node, list[fx.Node]] = {}  # of each value, apart
        self.versions: Counter[int] = Counter()  # how often weights were changed

    def give(self, node: fx.Node) -> None:
        """An input of the program is there."""
        self.there.add(node)

    def read(self, node: fx.Node, inputs: Sequence[fx.Node]) -> str | None:
        """Notes what a node reads or frees; what is wrong with that, if anything."""
        there, freed, changed = self.there, self.freed, self.changed
        frees, fault = node.target is ops.free, None
        for value in inputs:
            if value not in there:
                fault = f"{self.where(node)} reads {value} before it is made"
            elif value in freed:
                verb = "frees" if frees else "reads"
                fault = f"{self.where(node)} {verb} {value} after its free"
            elif value in changed and not frees:
                fault = (
                    f"worker {self.rank}: {task_of(node)} reads {value} after "
                    f"{task_of(changed[value])} changed it"
                )
        if frees:
            freed.update(inputs)
        return fault

    def make(self, node: fx.Node, inputs: Sequence[fx.Node]) -> str | None:
        """Notes in whose memory a new value is, and what is no more in it; what is
        wrong with that, if anything."""
        self.there.add(node)
        target = node.target
        if target in OVERWRITES or target is ops.reduce:
            if target is ops.update and self.reference.by_arrival:
                return None  # what reads them there is proved one by one
            return self._overwrite(node)
        if target is operator.getitem and is_job(inputs[0]):
            return None
        if target is ops.piece:
            self.pieces.setdefault(inputs[0], []).append(node)
            return None
        sources = _shared(node, inputs)
        if sources:
            members = [node]
            for source in sources:
                members += self.shared.get(source, [source])
            for each in members:
                self.shared[each] = members
        return None

    def _overwrite(self, node: fx.Node) -> str | None:
        args = arguments(node)
        place = 1 + args[0] if node.target is ops.reduce else OVERWRITES[node.target]
        old, fault = args[place], None
        if isinstance(old, fx.Node):
            for each in self._over(old):
                self.changed[each] = node
                fault = fault or self._readers_fault(each, node)
        if "group" in of_call(node) and node.target in (ops.update, ops.renew):
            self.versions[of_call(node)["group"]] += 1
        return fault

    def _over(self, old: fx.Node) -> list[fx.Node]:
        """The values that have some of a value's memory; pieces have none of each
        other's."""
        found = self.shared.pop(old, [old])
        if old.target is ops.piece:
            whole = old.all_input_nodes[0]
            return found + self.shared.get(whole, [whole])
        return found + [p for each in found for p in self.pieces.get(each, ())]

    def _readers_fault(self, value: fx.Node, node: fx.Node) -> str | None:
        """Which reader of a value what goes over its memory does not wait for."""
        group = of_call(node).get("group", -1)
        waiting = [
            user
            for user in value.users
            if (is_job(user) or user.target in COPIES)
            and self.at[user] < self.at[node]
            and not self._comes_of(user, group)
        ]
        before = None
        for user in waiting:
            if before is None:
                before = self._before(node, min(map(self.at.__getitem__, waiting)))
            job = of_call(user).get("job") if is_job(user) else None
            if task_of(user) in before or (job is not None and _ends(job, before)):
                continue
            return (
                f"worker {self.rank}: {task_of(node)} changes {value} without waiting "
                f"for {task_of(user)}"
            )
        return None

    def _comes_of(self, reader: fx.Node, group: int) -> bool:
        """Whether new weights of a group can't be there before a job is over, as they
        come of its gradient."""
        job: Job | None = of_call(reader).get("job")
        if group < 0 or job is None:
            return False
        gives = job.stage in self.reference.groups[group].givers
        return gives and self.reference.round(job.microbatch) <= self.versions[group]

    def _before(self, node: fx.Node, first: int) -> dict[str, Job | None]:
        """The tasks that must be over when one starts, with their jobs, as far as they
        are not before a position."""
        found: dict[str, Job | None] = {task_of(node): None}
        queue, seen = [node], {node}
        while queue:
            for value in queue.pop().all_input_nodes:
                if value in seen or self.at[value] < first:
                    continue
                seen.add(value)
                queue.append(value)
                job = of_call(value).get("job") if is_job(value) else None
                if job is not None or task_of(value) not in found:
                    found[task_of(value)] = job
        return found

    def ends_with(self, value: fx.Node, send: fx.Node) -> bool:
        """Whether a send is the last of all that reads a value, or what shares its
        memory, and the only send."""
        at = self.at[send]
        for each in self.shared.get(value, (value,)):
            for user in each.users:
                if user is send or user.target is ops.free:
                    continue
                if user.target is ops.send or self.at[user] > at:
                    return False
        return True

    def where(self, node: fx.Node) -> str:
        """A node, its task and its worker, for people."""
        name = getattr(node.target, "__name__", str(node.target))
        if "tag" in node.kwargs:
            name = f"{name}(tag={node.kwargs['tag']})"
        return f"worker {self.rank}: {name} of {task_of(node)}"


def _shared(node: fx.Node, inputs: Sequence[fx.Node]) -> Sequence[fx.Node]:
    """The values in whose memory a new one may be."""
    if node.target is ops.replica:
        *_, copied, weights = arguments(node)
        return [] if copied else [weights]
    if node.target in (operator.getitem, ops.bundle) or of_call(node).get("own"):
        return inputs
    if node.target in (ops.offload, ops.reload):
        return inputs[:1]
    return []


def _ends(job: Job, before: dict[str, Job | None]) -> bool:
    """Whether a later job of its stage and microbatch, which comes of it, is over."""
    order = list(Direction)
    return any(
        each is not None
        and each.stage == job.stage
        and each.microbatch == job.microbatch
        and order.index(each.direction) > order.index(job.direction)
        for each in before.values()
    )
