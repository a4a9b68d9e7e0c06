"""Cuts the global graph into one program per worker."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..graphs import result
from ..request import Request


def cut_programs(gm: fx.GraphModule, request: Request) -> list[fx.GraphModule]:
    """The nodes of each worker, in the global order, as a program of its own.

    before: send(a_0, to=1, tag=3)        # worker 0
            recv_3 = recv(source=0, tag=3)  # worker 1
    after:  program 0: send(a_0, to=1, tag=3)
            program 1: recv_3 = recv(source=0, tag=3)

    A program takes the weights that its worker keeps and reads, and the inputs that
    its jobs read; it returns its share of the results.
    """
    workers = range(request.schedule.workers)
    nodes: list[list[fx.Node]] = [[] for _ in workers]
    given = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            given.append(node)
        elif node.op != "output":
            nodes[node.meta["worker"]].append(node)
    results = result(gm)
    return [
        _program(gm, given, nodes[worker], results[str(worker)]) for worker in workers
    ]


def _program(
    gm: fx.GraphModule, given: list[fx.Node], nodes: list[fx.Node], results: Any
) -> fx.GraphModule:
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    read = {p for node in nodes for p in node.all_input_nodes}
    for node in given:
        if node in read:
            new[node] = graph.placeholder(node.name)
            new[node].meta = dict(node.meta)
    for node in nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(fx.map_arg(results, new.__getitem__))
    graph.lint()
    return fx.GraphModule(gm, graph, "Program")
