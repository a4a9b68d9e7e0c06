"""When the jobs of a step run, if its messages take time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import networkx as nx

from ..clock.network import Link, delays
from ..clock.timeline import Timeline
from ..ir import ops
from ..ir.garbage import no_collection
from ..ir.meta import of_call
from ..ir.step import (
    Credit,
    JobOutput,
    Message,
    Op,
    Step,
    Value,
    Weights,
    read,
    values_in,
)
from ..jobs.job import Direction, Job
from .traffic import Moved, moved

PARAMETERS = (Moved.WEIGHTS, Moved.GRADIENTS)


class Times(NamedTuple):
    """timeline: of the jobs. end: of the last of them, and of the last message with
    weights or gradients, if these take time."""

    timeline: Timeline
    end: float


@no_collection()
def step_times(
    step: Step,
    stages: nx.DiGraph[int],
    seconds: Sequence[float],
    transfer: float | Link | None,
    parameters: bool,
) -> Times:
    """When each job starts and ends: a worker's jobs one after the other, each when all
    that it reads is there.

    A message leaves when its value is made; one that brings weights not before its
    reader's worker is done with the job before that which asks for them. Sums and
    copies take no time, and hold up what reads them alone. B comes after its F, even if
    it reads nothing of it.

    seconds: of each job, by number. transfer: what a message takes; on a Link, they
    leave in the order of lines; None for the `seconds` of edges and `fetch` of stages.
    parameters: whether weights, and gradients of them, take time.
    """
    clock = _Clock(step, stages, transfer, parameters)
    for line in step.lines:
        if isinstance(line, Message):
            clock.send(line)
        else:
            clock.run(line, seconds)
    order = sorted(clock.ran, key=lambda ran: (ran[1], step.jobs.worker[ran[0]]))
    numbers, starts, ends = ([ran[i] for ran in order] for i in range(3))
    timeline = Timeline(step.jobs, numbers, starts, ends)
    return Times(timeline, max([clock.last, *ends]))


class _Clock:
    def __init__(
        self,
        step: Step,
        stages: nx.DiGraph[int],
        transfer: float | Link | None,
        parameters: bool,
    ) -> None:
        self.step, self.transfer, self.parameters = step, transfer, parameters
        self.stages, self.edges = stages, delays(step.jobs, stages, None)
        self.free = [0.0] * step.jobs.workers
        self.ended: dict[int, float] = {}  # jobs but updates, by number
        self.made: dict[Op, float] = {}  # by others
        self.there: dict[tuple[Value, int], float] = {}  # by value and worker
        self.links: dict[tuple[int, int], float] = {}  # when each is free again
        self.ran: list[tuple[Any, ...]] = []  # number, start, end
        self.last = 0.0

    def run(self, op: Op, seconds: Sequence[float]) -> None:
        """An op of a worker."""
        job, here = op.job, op.worker
        start = max((self._read(v, op) for v in read(op, here)), default=0.0)
        if job is not None and job.direction is Direction.BACKWARD:
            forward = Job(job.stage, job.microbatch, Direction.FORWARD)
            start = max(start, self.ended[self.step.jobs.number(forward)])
        if job is None and op.target is not ops.update:
            self.made[op] = start
            return
        end = start = max(start, self.free[here])
        if job is not None:  # else it is another group's part of the same update
            number = self.step.jobs.number(job, here)
            end += seconds[number]
            self.ran.append((number, start, end))
            self.ended[number] = end
        self.free[here] = self.made[op] = end

    def _read(self, value: Value, op: Op) -> float:
        """When an op's worker has a value."""
        when = self.there.get((value, op.worker))
        if when is None:
            return self._made(value)
        job = op.job
        if self.transfer is not None or job is None:
            return when
        while isinstance(value, Op) and value.target is ops.add:
            value = value.args[0]
        if isinstance(value, JobOutput):
            reader = self.step.jobs.at[job.stage, job.direction]
            when += self.edges.get((self.step.maker[value.node], reader), 0.0)
        return when

    def _made(self, value: Value) -> float:
        """When a value is where it is made."""
        jobs = self.step.jobs
        if isinstance(value, Op):
            return self.made[value]
        if isinstance(value, Credit):
            return self.ended[jobs.number(value.job)]
        if isinstance(value, JobOutput):
            kind = self.step.maker[value.node]
            return self.ended[jobs.find(kind, value.microbatch)]
        return 0.0

    def send(self, message: Message) -> None:
        """A message, at its place among the lines."""
        value, to, what = message.value, message.to, moved(self.step, message.value)
        when = self._made(value)
        if what in PARAMETERS and self.parameters:
            if message.fetches:
                when = max(when, self.free[to])
            when = self._arrival(message, when)
            self.last = max(self.last, when)
        elif what is Moved.ACTIVATIONS:
            when = self._arrival(message, when)
        self.there[message if message.fetches else value, to] = when

    def _arrival(self, message: Message, now: float) -> float:
        """When a message is there that leaves now, or when its link is free."""
        if self.transfer is None:  # readers know how long their edges take
            return now + self._fetch_seconds(message.value)
        if not isinstance(self.transfer, Link):
            return now + self.transfer
        between = message.source, message.to
        gone = max(now, self.links.get(between, 0.0))
        gone += message.bytes / self.transfer.bandwidth
        self.links[between] = gone
        return gone + self.transfer.latency

    def _fetch_seconds(self, value: Value) -> float:
        """What the stages say of a group's weights."""
        while isinstance(value, Op) and value.group is None:
            value = next(values_in(value.args))
        group = value.group if isinstance(value, Op) else None
        if isinstance(value, (JobOutput, Weights)):
            group = of_call(value.node).get("group")
        if group is None:
            return 0.0
        stage = self.step.facts.groups[group].stages[0]
        return float(self.stages.nodes[stage].get("fetch", 0.0))
