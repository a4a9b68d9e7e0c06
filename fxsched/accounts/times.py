"""When the jobs of a step run, if its messages take time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import networkx as nx

from ..clock.flows import Flows
from ..clock.network import Transfer, Wires, delays
from ..clock.timeline import Timeline
from ..ir import ops
from ..ir.garbage import no_collection
from ..ir.meta import of_call
from ..ir.moved import Moved, moved
from ..ir.step import (
    SERVED,
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
    transfer: Transfer,
    parameters: bool,
) -> Times:
    """When each job starts and ends: a worker's jobs one after the other, each when all
    that it reads is there.

    A message leaves when its value is made; one that brings weights not before its
    reader's worker is done with the job before that which asks for them. Sums and
    copies take no time, and hold up what reads them alone. B comes after its F, even if
    it reads nothing of it.

    seconds: of each job, by number. transfer: what a message takes; on wires, those of
    a pair of workers leave in the order of lines; None for the `seconds` of edges and
    `fetch` of stages. parameters: whether weights, and gradients of them, take time.
    """
    lines = _Lines(step, stages, seconds, transfer, parameters)
    for line in step.lines:
        if isinstance(line, Message):
            lines.message(line)
        else:
            lines.op(line)
    starts, ends = _run(lines, transfer)
    ran = [(starts[i], step.jobs.worker[j], j, i) for j, i in lines.jobs]
    ran.sort(key=lambda job: job[:2])
    when = [job[0] for job in ran], [ends[job[3]] for job in ran]
    timeline = Timeline(step.jobs, [job[2] for job in ran], *when)
    last = max((ends[i] for i in lines.parameters), default=0.0)
    return Times(timeline, max([last, *timeline.end]))


class _Lines:
    """The lines of a step, by number, and what each waits for.

    after: the lines that each waits for, and how long after the end of each.
    seconds: how long each takes, but messages on wires.
    sent: of messages on wires, their workers and bytes.
    jobs: the number of each job that isn't an update of another group, with its line.
    parameters: messages with weights or gradients, if these take time.
    """

    def __init__(
        self,
        step: Step,
        stages: nx.DiGraph[int],
        job_seconds: Sequence[float],
        transfer: Transfer,
        parameters: bool,
    ) -> None:
        self.step, self.stages, self.transfer = step, stages, transfer
        self.job_seconds, self.takes_time = job_seconds, parameters
        self.edges = delays(step.jobs, stages, None)
        self.after: list[list[tuple[int, float]]] = []
        self.seconds: list[float] = []
        self.sent: dict[int, Message] = {}
        self.jobs: list[tuple[int, int]] = []
        self.parameters: list[int] = []
        self.last: dict[int, int] = {}  # the line that each worker is busy with
        self.done: dict[int, list[int]] = {}  # all of these
        self.ended: dict[int, int] = {}  # jobs but updates, by number
        self.made: dict[Op, int] = {}
        self.there: dict[tuple[Value, int], int] = {}  # messages, by value and worker

    def _add(self, after: Iterable[tuple[int, float]], seconds: float) -> int:
        self.after.append([*after])
        self.seconds.append(seconds)
        return len(self.seconds) - 1

    def op(self, op: Op) -> None:
        """An op of a worker."""
        job, here = op.job, op.worker
        after = [each for v in read(op, here) for each in self._read(v, op)]
        if job is not None and job.direction is Direction.BACKWARD:
            forward = Job(job.stage, job.microbatch, Direction.FORWARD)
            after.append((self.ended[self.step.jobs.number(forward)], 0.0))
        if job is None and op.target is not ops.update:
            self.made[op] = self._add(after, 0.0)
            return
        if here in self.last:
            after.append((self.last[here], 0.0))
        if job is None:  # another group's part of the same update
            new = self._add(after, 0.0)
        else:
            number = self.step.jobs.number(job, here)
            new = self.ended[number] = self._add(after, self.job_seconds[number])
            self.jobs.append((number, new))
        self.last[here] = self.made[op] = new
        self.done.setdefault(here, []).append(new)

    def _read(self, value: Value, op: Op) -> list[tuple[int, float]]:
        """What an op waits for to have a value."""
        message = self.there.get((value, op.worker))
        if message is None:
            return self._made(value)
        job, delay = op.job, 0.0
        if self.transfer is None and job is not None:
            while isinstance(value, Op) and value.target is ops.add:
                value = value.args[0]
            if isinstance(value, JobOutput):
                reader = self.step.jobs.at[job.stage, job.direction]
                delay = self.edges.get((self.step.maker[value.node], reader), 0.0)
        return [(message, delay)]

    def _made(self, value: Value) -> list[tuple[int, float]]:
        """What makes a value; nothing, if it is there from the start."""
        jobs = self.step.jobs
        if isinstance(value, Op):
            return [(self.made[value], 0.0)]
        if isinstance(value, Credit):
            return [(self.ended[jobs.number(value.job)], 0.0)]
        if isinstance(value, JobOutput):
            kind = self.step.maker[value.node]
            return [(self.ended[jobs.find(kind, value.microbatch)], 0.0)]
        return []

    def message(self, message: Message) -> None:
        """A message, at its place among the lines."""
        value, to = message.value, message.to
        handed_on = self.there.get((value, message.source))
        after = self._made(value) if handed_on is None else [(handed_on, 0.0)]
        between = message.fetches and not message.hands_on  # the sender's jobs
        if between and message.source in self.last:
            early = isinstance(value, Weights) and self.step.every is None
            done = self.done[message.source]
            if len(done) > SERVED * early:
                after.append((done[-1 - SERVED * early], 0.0))
        what = moved(self.step, value)
        parameters = what in PARAMETERS and self.takes_time
        if parameters and message.fetches and to in self.last:
            after = [*after, (self.last[to], 0.0)]
        timed, seconds = parameters or what is Moved.ACTIVATIONS, 0.0
        if timed and self.transfer is None:  # readers know how long their edges take
            seconds = self._fetch_seconds(value)
        elif timed and not isinstance(self.transfer, Wires):
            seconds = self.transfer or 0.0
        new = self._add(after, seconds)
        if timed and isinstance(self.transfer, Wires):
            self.sent[new] = message
        if parameters:
            self.parameters.append(new)
        self.there[message if message.fetches else value, to] = new

    def _fetch_seconds(self, value: Value) -> float:
        """What the stages say of a group's weights."""
        while isinstance(value, Message):
            value = value.value
        while isinstance(value, Op) and value.group is None:
            value = next(values_in(value.args))
        group = value.group if isinstance(value, Op) else None
        if isinstance(value, (JobOutput, Weights)):
            group = of_call(value.node).get("group")
        if group is None:
            return 0.0
        stage = self.step.facts.groups[group].stages[0]
        return float(self.stages.nodes[stage].get("fetch", 0.0))


def _run(lines: _Lines, transfer: Transfer) -> tuple[list[float], list[float]]:
    """When each line starts and ends. Messages on wires end where they arrive; all else
    as soon as what it waits for has ended, and what it takes is over."""
    sent = lines.sent
    if isinstance(transfer, Wires) and transfer.capacity:
        return _run_on_shared_wires(lines, transfer)
    starts: list[float] = []
    ends: list[float] = []
    free: dict[tuple[int, int], float] = {}  # when the wire of each pair is
    for i, (before, seconds) in enumerate(zip(lines.after, lines.seconds, strict=True)):
        when = max((ends[j] + delay for j, delay in before), default=0.0)
        starts.append(when)
        if i in sent:
            assert isinstance(transfer, Wires)
            pair = sent[i].source, sent[i].to
            wire = transfer.wire(*pair)
            when = max(when, free.get(pair, 0.0)) + sent[i].bytes / wire.bandwidth
            free[pair] = when
            when += wire.latency
        ends.append(when + seconds)
    return starts, ends


def _run_on_shared_wires(
    lines: _Lines, transfer: Wires
) -> tuple[list[float], list[float]]:
    """The same where messages of several pairs share a host's ways."""
    after, sent = lines.after, lines.sent
    pairs: dict[Hashable, list[int]] = {}
    for number, message in sent.items():
        pairs.setdefault((message.source, message.to), []).append(number)
    flows = Flows(pairs, transfer.capacity)
    readers: list[list[tuple[int, float]]] = [[] for _ in after]
    for reader, before in enumerate(after):
        for i, delay in before:
            readers[i].append((reader, delay))
    missing, starts = [len(before) for before in after], [0.0] * len(after)
    ends = [0.0] * len(after)
    ready = [i for i, count in enumerate(missing) if not count]

    def run_ready() -> None:
        while ready:
            i = ready.pop()
            if (message := sent.get(i)) is None:
                end(i, starts[i] + lines.seconds[i])
            else:
                wire = transfer.wire(message.source, message.to)
                flows.add(i, starts[i], wire, message.bytes)

    def end(i: int, when: float) -> None:
        ends[i] = when
        for reader, delay in readers[i]:
            starts[reader] = max(starts[reader], when + delay)
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)

    run_ready()
    while (arrival := flows.next()) is not None:
        end(arrival[1], arrival[0])
        run_ready()
    return starts, ends
