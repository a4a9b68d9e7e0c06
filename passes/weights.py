"""Brings weights to jobs that run where they are not kept."""

from __future__ import annotations

from collections import deque

from torch import fx

from ..ir.graphs import Group, arguments
from ..ir.request import Request
from ..ir.step_ir import Layout, Line, Message
from ..jobs import Direction, Job, Placement


def fetch_weights(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """A message for each run of jobs on a worker that reads weights kept elsewhere.

    before: 1F0                                                      # worker 0
            2F0                                                      # worker 0
    after:  message 7: weights_2 from worker 2 to worker 0
            1F0                                                      # worker 0
            2F0, weights 2 of message 7                              # worker 0

    Weights are asked for request.prefetch jobs ahead (here 1), and kept while the
    worker's next job reads them too.
    """
    groups: list[Group] = gm.meta["groups"]
    placements: dict[Job, Placement] = gm.meta["placements"]
    layout: Layout = gm.meta["layout"]
    reads = [_weights(recipe.call) for recipe in layout.recipes]
    writes = [
        [layout.parts[node][1] for node in recipe.nodes if node in layout.parts]
        for recipe in layout.recipes
    ]
    lines: list[Line] = gm.meta["lines"]
    at_hand: dict[int, dict[int, Message]] = {}  # what the last job on a worker read
    ahead = request.prefetch
    last: dict[int, deque[Line]] = {}  # the last `ahead` jobs on a worker
    written: set[tuple[int, int]] = set()  # groups that F wrote into, on a worker
    before: dict[Line, list[Message]] = {}
    tag = 0
    for line in lines:
        job, worker = line.job, line.worker
        if job is None:
            continue
        kind = layout.jobs.at[job.stage, job.direction]
        forward = job.direction is Direction.FORWARD
        kept = line.fetched
        jobs = last.setdefault(worker, deque(maxlen=ahead))
        start = lines[0] if len(jobs) < ahead else jobs[0] if jobs else line
        for weights in reads[kind]:
            group = weights.meta["group"]
            source = _source(groups[group], placements[job])
            if source == worker or (forward and (group, worker) in written):
                continue
            message = at_hand.get(worker, {}).get(group)
            if message is None or message.source != source:
                message = Message(tag, source, worker, weights, line.task, line.n)
                before.setdefault(start, []).append(message)
                tag += 1
            kept[group] = message
        at_hand[worker] = kept
        jobs.append(line)
        if forward:
            written.update((group, worker) for group in writes[kind])
    gm.meta["lines"] = [
        each for line in lines for each in (*before.get(line, ()), line)
    ]
    gm.meta["tags"] = tag
    return gm


def _weights(call: fx.Node) -> list[fx.Node]:
    return [w for w in arguments(call)[0] if w.op == "placeholder"]


def _source(group: Group, placement: Placement) -> int:
    """The owner that a job gets a group from: the one that w names, if it is one.

    A tied parameter is kept by the owners of its first stage only, and what an earlier
    plan placed stays there; then a job's own worker comes first.
    """
    for worker in placement:
        if worker in group.owners:
            return worker
    return group.owners[0]
