"""Brings weights to jobs that run where they are not kept."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import count

from torch import fx

from ..ir.graphs import Group, arguments
from ..ir.request import Request
from ..ir.step_ir import Line, Message, StepIR
from ..jobs import Direction, Job


def fetch_weights(step: StepIR, request: Request) -> StepIR:
    """A message for each run of jobs on a worker that reads weights kept elsewhere.

    before: 1F0                                                      # worker 0
            2F0                                                      # worker 0
    after:  message 7: weights_2 from worker 2 to worker 0
            1F0                                                      # worker 0
            2F0, weights 2 of message 7                              # worker 0

    Weights are asked for request.prefetch jobs ahead (here 1), and kept while the
    worker's next job reads them too.
    """
    foreign, ahead = _Foreign(step), request.prefetch
    at_hand: dict[int, dict[int, Message]] = {}  # what the last job on a worker read
    last: dict[int, deque[Line]] = {}  # the last `ahead` jobs on a worker
    fetched: dict[Line, dict[int, Message]] = {}
    before: dict[Line | Message, list[Message]] = {}
    tags = count()
    for line in step.lines:
        if isinstance(line, Message) or line.job is None:
            continue
        worker, here = line.worker, at_hand.get(line.worker, {})
        earlier = last.setdefault(worker, deque(maxlen=ahead))
        start = step.lines[0] if len(earlier) < ahead else [*earlier, line][0]
        read: dict[int, Message] = {}
        for weights, source in foreign.of(line.job):
            group = weights.meta["group"]
            message = here.get(group)
            if message is None or message.source != source:
                where = (line.task, line.n)
                message = Message(next(tags), source, worker, weights, *where)
                before.setdefault(start, []).append(message)
            read[group] = message
        if read:
            fetched[line] = read
        at_hand[worker] = read
        earlier.append(line)
    lines = [each for line in step.lines for each in (*before.get(line, ()), line)]
    return replace(step, lines=lines, fetched=fetched)


class _Foreign:
    """The weights that jobs read and their workers do not have."""

    def __init__(self, step: StepIR) -> None:
        self.groups, self.jobs = step.facts.groups, step.jobs
        self.reads = [_weights(recipe.call) for recipe in step.recipes]
        self.writes = [
            [step.parts[node][1] for node in recipe.nodes if node in step.parts]
            for recipe in step.recipes
        ]
        self.written: set[tuple[int, int]] = set()  # groups, by F of a worker

    def of(self, job: Job) -> list[tuple[fx.Node, int]]:
        """Those of a worker's next job, and who serves them."""
        number = self.jobs.number(job)
        kind, worker = number % len(self.jobs.kinds), self.jobs.compute[number]
        keeper = self.jobs.weights[number]
        served = []
        for weights in self.reads[kind]:
            group = weights.meta["group"]
            source = _source(self.groups[group], keeper, worker)
            forward = job.direction is Direction.FORWARD
            if source != worker and not (forward and (group, worker) in self.written):
                served.append((weights, source))
        if job.direction is Direction.FORWARD:
            self.written.update((group, worker) for group in self.writes[kind])
        return served


def _weights(call: fx.Node) -> list[fx.Node]:
    return [w for w in arguments(call)[0] if w.op == "placeholder"]


def _source(group: Group, keeper: int, worker: int) -> int:
    """The owner that a job gets a group from: the one that w names, if it is one.

    A tied parameter is kept by the owners of its first stage only, and what an earlier
    plan placed stays there; then a job's own worker comes first.
    """
    places = [each for each in (keeper, worker) if each in group.owners]
    return [*places, group.owners[0]][0]
