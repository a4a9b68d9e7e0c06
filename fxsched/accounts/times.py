"""When the jobs of a step run, if its messages take time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import networkx as nx
import numpy as np

from ..clock.lines import SECONDS, Lines, as_timeline, run_lines
from ..clock.links import FindLinks, link_uses
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
    weights or gradients, if these take time. find_links: finds the use of links."""

    timeline: Timeline
    end: float
    find_links: FindLinks


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
    copies take no time, and hold up what reads them alone. What waits elsewhere comes
    back after the job before it. B comes after its F, even if it reads nothing of it.

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
    capacity = transfer.capacity if isinstance(transfer, Wires) else {}
    waits = np.array(lines.waits, np.int64).reshape(-1, 2).T
    each = Lines(lines.amounts, lines.ways, lines.turns, *waits)
    starts, ends = run_lines(each, capacity)
    numbers, own = zip(*lines.jobs, strict=True) if lines.jobs else ((), ())
    when = [starts[i] for i in own], [ends[i] for i in own]
    timeline = as_timeline(step.jobs, numbers, *when)
    last = max((ends[i] for i in lines.parameters), default=0.0)
    use = partial(link_uses, each, starts, ends)
    return Times(timeline, max([last, *timeline.end]), use if lines.wires else tuple)


class _Lines:
    """The lines of a step, by number, and what each waits for.

    amounts, ways, turns, waits: see clock.lines. wires: the place among the ways of a
        pair of workers.
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
        self.amounts: list[float] = []
        self.ways = [SECONDS] * (1 + step.jobs.workers)
        self.turns: list[int] = []
        self.waits: list[tuple[int, int]] = []
        self.wires: dict[tuple[int, int], int] = {}
        self.jobs: list[tuple[int, int]] = []
        self.parameters: list[int] = []
        self.last: dict[int, int] = {}  # the line that each worker is busy with
        self.done: dict[int, list[int]] = {}  # all of these
        self.ended: dict[int, int] = {}  # jobs but updates, by number
        self.made: dict[Op, int] = {}
        self.there: dict[tuple[Value, int], int] = {}  # messages, by value and worker

    def _add(self, after: Sequence[int], amount: float, turn: int = 0) -> int:
        new = len(self.amounts)
        self.amounts.append(amount)
        self.turns.append(turn)
        self.waits += ((maker, new) for maker in after)
        return new

    def op(self, op: Op) -> None:
        """An op of a worker."""
        job, here = op.job, op.worker
        after = [each for v in read(op, here) for each in self._read(v, op)]
        if job is not None and job.direction is Direction.BACKWARD:
            forward = Job(job.stage, job.microbatch, Direction.FORWARD)
            after.append(self.ended[self.step.jobs.number(forward)])
        if job is None and op.target is not ops.update:
            if op.target is ops.reload and here in self.last:
                after.append(self.last[here])
            self.made[op] = self._add(after, op.seconds, self._turn(op))
            return
        if job is None:  # another group's part of the same update
            new = self._add(after, 0.0, 1 + here)
        else:
            number = self.step.jobs.number(job, here)
            new = self._add(after, self.job_seconds[number], 1 + here)
            self.ended[number] = new
            self.jobs.append((number, new))
        self.last[here] = self.made[op] = new
        self.done.setdefault(here, []).append(new)

    def _turn(self, op: Op) -> int:
        """What an op takes its turn on that is no job: its lane, or its worker."""
        if not op.seconds or not op.aside:
            return (1 + op.worker) * bool(op.seconds)
        lane = op.worker, -op.aside
        if lane not in self.wires:
            self.wires[lane] = len(self.ways)
            self.ways.append(SECONDS)
        return self.wires[lane]

    def _read(self, value: Value, op: Op) -> list[int]:
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
        return [self._add([message], delay) if delay else message]

    def _made(self, value: Value) -> list[int]:
        """What makes a value; nothing, if it is there from the start."""
        jobs = self.step.jobs
        if isinstance(value, Op):
            return [self.made[value]]
        if isinstance(value, Credit):
            return [self.ended[jobs.number(value.job)]]
        if isinstance(value, JobOutput):
            kind = self.step.maker[value.node]
            return [self.ended[jobs.find(kind, value.microbatch)]]
        return []

    def message(self, message: Message) -> None:
        """A message, at its place among the lines."""
        value, to = message.value, message.to
        handed_on = self.there.get((value, message.source))
        after = self._made(value) if handed_on is None else [handed_on]
        between = message.fetches and not message.hands_on  # the sender's jobs
        if between and message.source in self.last:
            early = isinstance(value, Weights) and self.step.every is None
            done = self.done[message.source]
            if len(done) > SERVED * early:
                after.append(done[-1 - SERVED * early])
        what = moved(self.step, value)
        parameters = what in PARAMETERS and self.takes_time
        if parameters and message.fetches and to in self.last:
            after.append(self.last[to])
        amount, turn = 0.0, 0
        if parameters or what is Moved.ACTIVATIONS:
            amount, turn = self._taken(message)
        new = self._add(after, amount, turn)
        if parameters:
            self.parameters.append(new)
        self.there[message if message.fetches else value, to] = new

    def _taken(self, message: Message) -> tuple[float, int]:
        """What a message takes, and what it takes its turn on."""
        if self.transfer is None:  # readers know how long their edges take
            return self._fetch_seconds(message.value), 0
        if not isinstance(self.transfer, Wires):
            return self.transfer, 0
        pair = message.source, message.to
        if pair not in self.wires:
            self.wires[pair] = len(self.ways)
            self.ways.append(self.transfer.wire(*pair))
        return message.bytes, self.wires[pair]

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
