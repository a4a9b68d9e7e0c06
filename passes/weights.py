"""Brings weights to jobs that run where they are not kept."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from torch import fx

from ..ir.graphs import Group, arguments
from ..ir.request import Request
from ..ir.step_ir import Line, Message, StepIR
from ..jobs import Direction


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
    groups, jobs = step.facts.groups, step.jobs
    reads = [_weights(recipe.call) for recipe in step.recipes]
    writes = [
        [step.parts[node][1] for node in recipe.nodes if node in step.parts]
        for recipe in step.recipes
    ]
    fetched: dict[Line, dict[int, Message]] = {}
    at_hand: dict[int, dict[int, Message]] = {}  # what the last job on a worker read
    ahead = request.prefetch
    last: dict[int, deque[Line]] = {}  # the last `ahead` jobs on a worker
    written: set[tuple[int, int]] = set()  # groups that F wrote into, on a worker
    before: dict[Line | Message, list[Message]] = {}
    tag = 0
    for line in step.lines:
        if isinstance(line, Message) or line.job is None:
            continue
        worker, number = line.worker, jobs.number(line.job)
        kind = number % len(jobs.kinds)
        forward = jobs.kinds[kind][1] is Direction.FORWARD
        here: dict[int, Message] = {}
        earlier = last.setdefault(worker, deque(maxlen=ahead))
        start = step.lines[0] if len(earlier) < ahead else [*earlier, line][0]
        for weights in reads[kind]:
            group = weights.meta["group"]
            source = _source(groups[group], jobs.weights[number], worker)
            if source == worker or (forward and (group, worker) in written):
                continue
            message = at_hand.get(worker, {}).get(group)
            if message is None or message.source != source:
                message = Message(tag, source, worker, weights, line.task, line.n)
                before.setdefault(start, []).append(message)
                tag += 1
            here[group] = message
        at_hand[worker] = here
        if here:
            fetched[line] = here
        earlier.append(line)
        if forward:
            written.update((group, worker) for group in writes[kind])
    lines = [each for line in step.lines for each in (*before.get(line, ()), line)]
    return replace(step, lines=lines, fetched=fetched)


def _weights(call: fx.Node) -> list[fx.Node]:
    return [w for w in arguments(call)[0] if w.op == "placeholder"]


def _source(group: Group, keeper: int, worker: int) -> int:
    """The owner that a job gets a group from: the one that w names, if it is one.

    A tied parameter is kept by the owners of its first stage only, and what an earlier
    plan placed stays there; then a job's own worker comes first.
    """
    places = [each for each in (keeper, worker) if each in group.owners]
    return [*places, group.owners[0]][0]
