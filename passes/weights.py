"""Brings weights to jobs that run where they are not kept."""

from __future__ import annotations

from typing import Any

from torch import fx

from .. import ops
from ..graphs import Group
from ..jobs import Job, Placement
from ..request import Request


def fetch_weights(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """A fetch for each run of jobs on a worker that reads weights kept elsewhere.

    before: job_1F0 = self.forward_1((weights_1,), (a,), None)       # worker 0
            job_2F0 = self.forward_2((weights_2,), (b,), None)       # worker 0
    after:  send(weights_2, to=0, tag=7)                             # worker 2
            fetch_7 = fetch(source=2, tag=7)                         # worker 0
            job_1F0 = self.forward_1((weights_1,), (a,), None)
            job_2F0 = self.forward_2((fetch_7,), (b,), None)

    Weights are asked for one job ahead, and kept while the worker's next job reads
    them too.
    """
    groups: list[Group] = gm.meta["groups"]
    placements: dict[Job, Placement] = gm.meta["placements"]
    at_hand: dict[int, dict[int, fx.Node]] = {}  # what the last job on a worker read
    start: dict[int, fx.Node] = {}  # the first node of the last job on a worker
    first = _first_of_task(gm.graph)
    begin = next(n for n in gm.graph.nodes if n.op != "placeholder")
    tags = 0
    for call in [n for n in gm.graph.nodes if n.op == "call_module"]:
        worker, job = call.meta["worker"], call.meta["job"]
        kept: dict[int, fx.Node] = {}
        for weights in _weights(call):
            number = weights.meta["group"]
            source = _source(groups[number], placements[job])
            if source == worker:
                continue
            fetch = at_hand.get(worker, {}).get(number)
            if fetch is None or fetch.kwargs["source"] != source:
                with gm.graph.inserting_before(start.get(worker, begin)):
                    fetch = _fetch(gm.graph, weights, source, call, tags)
                tags += 1
            kept[number] = fetch
            call.replace_input_with(weights, fetch)
        at_hand[worker] = kept
        start[worker] = first[call]
    gm.meta["tags"] = tags
    return gm


def _weights(call: fx.Node) -> list[fx.Node]:
    given: Any = call.args[0]
    return [w for w in given if w.op == "placeholder"]


def _source(group: Group, placement: Placement) -> int:
    """The owner that a job gets a group from: the one that w names, if it is one.

    A tied parameter is kept by the owners of its first stage only, and what an earlier
    plan placed stays there; then a job's own worker comes first.
    """
    for worker in placement:
        if worker in group.owners:
            return worker
    return group.owners[0]


def _fetch(
    graph: fx.Graph, weights: fx.Node, source: int, call: fx.Node, tag: int
) -> fx.Node:
    to = call.meta["worker"]
    send = graph.call_function(ops.send, (weights,), {"to": to, "tag": tag})
    send.meta.update(worker=source, task=f"serve {tag}", n=call.meta["n"], specs=())
    fetch = graph.call_function(ops.fetch, (), {"source": source, "tag": tag})
    fetch.name = f"fetch_{tag}"
    fetch.meta.update(
        worker=to,
        task=call.meta["task"],
        n=call.meta["n"],
        specs=weights.meta["specs"],
        group=weights.meta["group"],
        bundle=True,
    )
    return fetch


def _first_of_task(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each call, the first node of its job."""
    first: dict[str, fx.Node] = {}
    result = {}
    for node in graph.nodes:
        if "task" in node.meta:
            first.setdefault(node.meta["task"], node)
            if node.op == "call_module":
                result[node] = first[node.meta["task"]]
    return result
