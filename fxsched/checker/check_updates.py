"""What one worker's program shows of updates, and of the weights that its jobs read.

A group of weights has versions: how many updates of it there have been in the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ..ir import ops
from ..ir.graphs import Group, arguments
from ..jobs.job import Job

# the argument in whose place new weights are
OWN = {ops.update: 3, ops.renew: 1, ops.take: 3}
COPIES: dict[Any, int] = {ops.copy: 1, ops.correct: 4}  # the weights


class Updates(NamedTuple):
    """The updates of a step: for how many microbatches each is, who runs it, and how
    many of them the weights of a job have seen, by the user's version.

    gap: of a job, how many velocities it reads away from its version of weights.
    stale: whether jobs may read earlier versions than the newest before their update.
    current: whether all copies of weights are the newest when a call begins.
    ahead: where updates are in order of arrival, how many more one worker may have
        given than another; 0 where they are in the planned order.
    average_every: after how many of its own updates a worker's replica is averaged with
        the others. elastic: whether around a centre. updates: how many a call
        has.
    in_order: whether gradients are added in the order of microbatches.
    gradient_dtype: what they are added up in; None for the weights' types.
    """

    every: int | None = None
    workers: Mapping[Job, tuple[int, ...]] = {}
    seen: Callable[[Job], int] = lambda job: 0
    stale: bool = False
    current: bool = False
    gap: Callable[[Job], float] = lambda job: 0.0
    ahead: float = 0
    average_every: int | None = None
    elastic: bool = False
    updates: int = 0
    in_order: bool = False
    gradient_dtype: torch.dtype | None = None


class Weights(NamedTuple):
    """A group's weights that a worker keeps: their version, whether they are a copy
    that stays as it is, and how many velocities away from the weights that is."""

    group: int
    version: int
    copied: bool
    gap: float


class WeightUse(NamedTuple):
    """A task that reads weights that came with a message, their version, whether newer
    ones may be in their place meanwhile, and how many velocities away they should be.
    """

    task: str
    group: int
    tag: int
    version: int
    stale: bool
    gap: float


class UpdateFault(Exception):
    """What is wrong with the updates of a program."""


class WeightReads:
    """The weights that a program's nodes read.

    uses: of those that came with messages, to be held against what was sent.
    """

    def __init__(
        self, rank: int, nodes: Sequence[fx.Node], groups: Sequence[Group], all: Updates
    ) -> None:
        self.rank, self.nodes, self.groups, self.all = rank, nodes, groups, all
        self.uses: list[WeightUse] = []

    def version(self, value: fx.Node) -> int | None:
        """Of weights that this worker keeps; None for other values."""
        if value.op == "placeholder":
            return 0 if "group" in value.meta else None
        if value.target in COPIES:
            return self.version(arguments(value)[COPIES[value.target]])
        if value.target in OWN:
            before = self.version(arguments(value)[OWN[value.target]])
            steps = self.all.every is not None and value.target is not ops.take
            return None if before is None else before + steps
        return None

    def of(self, value: fx.Node) -> Weights | None:
        """What weights a value is, if it is any that this worker keeps."""
        version, copied = self.version(value), value.target in COPIES
        if version is None:
            return None
        return Weights(value.meta["group"], version, copied, self._gap(value))

    def _gap(self, value: fx.Node) -> float:
        """How many velocities weights here are away from their version."""
        if value.target is not ops.correct:
            return 0.0
        group, version, gap, weights = arguments(value)[1:5]
        if group != value.meta["group"] or version != self.version(weights):
            raise UpdateFault(
                f"worker {self.rank}: {value.meta['task']} takes the velocity of "
                f"version {version} of group {group} from version "
                f"{self.version(weights)} of group {value.meta['group']}"
            )
        return float(gap) + self._gap(weights)

    def updates(self) -> Iterator[tuple[Job, int, fx.Node]]:
        """The updates here: job, group, gradients. Raises UpdateFault unless they are
        those that should be, each of the version before it, once."""
        wanted = Counter(
            (job, number)
            for job, workers in self.all.workers.items()
            if self.rank in workers
            for number, group in enumerate(self.groups)
            if group.stages[0] == job.stage and any(group.trained)
            if self.rank in group.updaters
        )
        every, jobs = self.all.every or 1, {str(job): job for job in self.all.workers}
        for node in self.nodes:
            if node.target is not ops.update:
                continue
            task = node.meta["task"]
            job, (group, _, weights, gradients) = jobs.get(task), arguments(node)[1:5]
            if job is None or not wanted[job, group]:
                raise UpdateFault(
                    f"worker {self.rank}: {task} updates group {group} once more than "
                    "it should"
                )
            wanted[job, group] -= 1
            if self.version(weights) != job.microbatch // every:
                raise UpdateFault(
                    f"worker {self.rank}: {job} updates version "
                    f"{self.version(weights)} of group {group}"
                )
            self._check_averaged(weights, str(job))
            yield job, group, gradients
        for job, group in wanted.elements():
            raise UpdateFault(
                f"worker {self.rank}: {job} does not update group {group}"
            )

    def check_reads(self) -> None:
        """Each job reads the weights that the updates before its microbatch left, and
        no one reads weights that an update, in their place, has changed."""
        changed: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            for value in node.all_input_nodes:
                if value in changed and node.target is not ops.free:
                    raise UpdateFault(
                        f"worker {self.rank}: {node.meta.get('task', node)} reads "
                        f"{value} after {changed[value].meta['task']} changed it"
                    )
            if node.op == "call_module" and "job" in node.meta:
                self._check_job(node)
            if node.target in COPIES:
                self._check_copy(node)
            if node.target in OWN:
                changed[arguments(node)[OWN[node.target]]] = node
            if node.target is ops.renew:
                new, version = arguments(node)[2], self.version(node)
                self._note(node.meta["task"], new, version, self.all.stale, 0.0)
            stale = node.target is ops.send and self._is_stale(arguments(node)[0])
            if stale:
                raise UpdateFault(
                    f"worker {self.rank}: {node.meta['task']} sends weights that "
                    "another worker updates, and they were not renewed"
                )

    def _check_copy(self, node: fx.Node) -> None:
        """What puts new weights in the place of those that are copied waits for that,
        in any order of tasks."""
        weights = arguments(node)[COPIES[node.target]]
        for user in weights.users:
            replaces = user.target in OWN and arguments(user)[OWN[user.target]]
            if replaces is weights and node not in user.all_input_nodes:
                raise UpdateFault(
                    f"worker {self.rank}: {user.meta['task']} changes {weights} "
                    f"without waiting for {node.meta['task']}"
                )

    def _check_job(self, node: fx.Node) -> None:
        job: Job = node.meta["job"]
        for value in node.args[0]:  # type: ignore[union-attr]
            if not isinstance(value, fx.Node):
                continue
            group = value.meta.get("group")
            if group is None or not self._changes(self.groups[group]):
                continue
            wanted, gap = self.all.seen(job), self.all.gap(job)
            stale = wanted != job.microbatch // (self.all.every or job.microbatch + 1)
            gap = gap if any(self.groups[group].trained) else 0.0
            if value.target is ops.fetch:
                self._note(str(job), value, wanted, stale, gap)
            elif self._gap(value) != gap:
                raise UpdateFault(
                    f"worker {self.rank}: {job} reads group {group} "
                    f"{self._gap(value):g} velocities away from its version, not "
                    f"{gap:g}"
                )
            elif self.version(value) != wanted or self._is_stale(value):
                raise UpdateFault(
                    f"worker {self.rank}: {job} reads version {self.version(value)} of "
                    f"group {group}, not {wanted}"
                )
            self._check_averaged(value, str(job))
            if value.target is not ops.fetch and stale and not self._waits(value, node):
                raise UpdateFault(
                    f"worker {self.rank}: {job} reads version {wanted} of group "
                    f"{group} in a place where an update puts the next one without "
                    "waiting for it"
                )

    def _check_averaged(self, weights: fx.Node, reader: str) -> None:
        """Where replicas are averaged, no one reads weights that should be."""
        every, version = self.all.average_every, self.version(weights)
        if every is None or not version or version % every:
            return
        if weights.target is not ops.take:
            raise UpdateFault(
                f"worker {self.rank}: {reader} reads its replica of group "
                f"{weights.meta['group']} after {version} updates, not the average"
            )

    def _changes(self, group: Group) -> bool:
        """Whether updates change a group."""
        return any(group.trained) or group.updater is not None

    def _waits(self, weights: fx.Node, call: fx.Node) -> bool:
        """Whether what puts new weights in the place of these waits for a job."""
        if weights.target in COPIES:
            return True
        return all(
            any(v.target is ops.credit and call in v.args for v in user.all_input_nodes)
            for user in weights.users
            if user.target in OWN and arguments(user)[OWN[user.target]] is weights
        )

    def _note(
        self,
        task: str,
        value: fx.Node,
        version: int | None,
        stale: bool,
        gap: float,
    ) -> None:
        tag: Any = value.kwargs.get("tag")
        if value.target is not ops.fetch or version is None:
            raise UpdateFault(f"worker {self.rank}: {task} reads {value} as weights")
        group = value.meta["group"]
        self.uses.append(WeightUse(task, group, tag, version, stale, gap))

    def _is_stale(self, value: fx.Node) -> bool:
        """Whether it is a copy from before the call, of weights that another worker
        updates between calls."""
        if value.op != "placeholder" or "group" not in value.meta or self.all.current:
            return False
        updater = self.groups[value.meta["group"]].updater
        return updater not in (None, self.rank) and self.all.every is None
