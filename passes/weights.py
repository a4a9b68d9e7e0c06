"""Brings weights to jobs that run where they are not kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from torch import fx

from ..clock.weight_fetches import Foreign, foreign_reads
from ..ir.graphs import arguments
from ..ir.request import Request
from ..ir.step_ir import Line, Message, StepIR
from ..jobs.job import Job


def fetch_weights(step: StepIR, request: Request) -> StepIR:
    """A message for each run of jobs on a worker that reads weights kept elsewhere.

    before: 1F0                                                      # worker 0
            2F0                                                      # worker 0
    after:  message 7: weights_2 from worker 2 to worker 0
            1F0                                                      # worker 0
            2F0, weights 2 of message 7                              # worker 0

    Weights are asked for request.prefetch jobs ahead (here 1), and kept while the
    worker's next job reads them too, if no update came in between. New ones, for the
    lines of step.renewed too, are sent after the update that makes them.
    """
    ahead, tags = request.prefetch, count()
    fetched = _renewals(step, tags)
    at_hand: dict[int, dict[int, Message]] = {}  # what the last job on a worker read
    last: dict[int, deque[Line]] = {}  # the last `ahead` jobs on a worker
    before: dict[Line | Message, list[Message]] = {
        line: list(messages.values()) for line, messages in fetched.items()
    }
    after: dict[Line | Message, list[Message]] = {}  # updates
    place = (
        {line: i for i, line in enumerate(step.lines)}
        if step.updated or step.copies
        else {}
    )
    for line, job, foreign in _foreign(step):
        worker, here = line.worker, at_hand.get(line.worker, {})
        earlier = last.setdefault(worker, deque(maxlen=ahead))
        start = step.lines[0] if len(earlier) < ahead else [*earlier, line][0]
        read: dict[int, Message] = {}
        for weights, (_, source, new) in foreign:
            group, value = weights.meta["group"], step.weights(weights, job, source)
            if not new and here[group].value is value:
                read[group] = here[group]
                continue
            where = (line.task, line.n)
            message = Message(next(tags), source, worker, value, *where, True)
            if isinstance(value, Line) and place[value] >= place[start]:
                after.setdefault(value, []).append(message)
            else:
                before.setdefault(start, []).append(message)
            read[group] = message
        if read:
            fetched[line] = read
        at_hand[worker] = read
        earlier.append(line)
    lines = [
        each
        for line in step.lines
        for each in (*before.get(line, ()), line, *after.get(line, ()))
    ]
    return replace(step, lines=lines, fetched=fetched)


def _renewals(step: StepIR, tags: Iterator[int]) -> dict[Line, dict[int, Message]]:
    """The messages that bring new weights to copies, by line and group."""
    fetched: dict[Line, dict[int, Message]] = {}
    for line, (source, value) in step.renewed.items():
        assert line.group is not None, "weights are of a group"
        where = (line.task, line.n)
        message = Message(next(tags), source, line.worker, value, *where, True)
        fetched[line] = {line.group: message}
    return fetched


def _foreign(
    step: StepIR,
) -> Iterator[tuple[Line, Job, list[tuple[fx.Node, Foreign]]]]:
    """The jobs' lines, each with the weights that its worker does not have."""
    groups = step.facts.groups
    lines = [
        (line, line.job)
        for line in step.lines
        if isinstance(line, Line) and line.job is not None and line.target is None
    ]
    weights = [_weights(recipe.call) for recipe in step.recipes]
    numbers = [[w.meta["group"] for w in each] for each in weights]
    kinds = [[(g, groups[g].owners) for g in each] for each in numbers]
    order = [step.jobs.number(job) for _, job in lines]
    foreign = foreign_reads(kinds, _writers(step), step.jobs, order)
    for (line, job), number, reads in zip(lines, order, foreign, strict=True):
        nodes = weights[step.jobs.kind[number]]
        yield line, job, [(nodes[each.slot], each) for each in reads]


def _writers(step: StepIR) -> dict[int, list[int]]:
    """The kinds of F that write buffers of a group."""
    writers: dict[int, list[int]] = {}
    for kind, recipe in enumerate(step.recipes):
        for node in recipe.nodes:
            what, group = step.parts.get(node, ("", 0))
            if what == "buffers":
                writers.setdefault(group, []).append(kind)
    return writers


def _weights(call: fx.Node) -> list[fx.Node]:
    return [w for w in arguments(call)[0] if w.op == "placeholder"]
