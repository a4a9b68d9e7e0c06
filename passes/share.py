"""Computes cheap values in every stage that reads them."""

from __future__ import annotations

from torch import fx

from ..ir.meta import of_node
from ..ir.request import Request


def copy_shared(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """Gives each stage its own copy of the cheap values that it reads.

    before: keep = x != 0; a = encoder_0(x, keep)  # stage 0
            b = encoder_1(a, keep)  # stage 1
    after:  keep = x != 0  # stage 0
            keep_1 = x != 0  # stage 1
            a = encoder_0(x, keep); b = encoder_1(a, keep_1)

    Cheap are those that assign_stages gave no stage, though they are read: what is made
    from the inputs alone, in less time than sending it takes.
    """
    for node in reversed(gm.graph.nodes):
        if node.op.startswith("call") and "stage" not in of_node(node):
            _copy(gm.graph, node)
    gm.recompile()
    return gm


def _copy(graph: fx.Graph, node: fx.Node) -> None:
    """The node for its first stage, copies for the others; what only the output reads
    is in stage 0."""
    stages: dict[int, list[fx.Node]] = {}
    for user in node.users:
        if "stage" in of_node(user):
            stages.setdefault(of_node(user)["stage"], []).append(user)
    if not stages and any(user.op == "output" for user in node.users):
        stages[0] = []
    for position, (stage, users) in enumerate(sorted(stages.items())):
        copied = node
        if position:
            with graph.inserting_after(node):
                copied = graph.node_copy(node)
            for user in users:
                user.replace_input_with(node, copied)
        copied.meta = {**node.meta, "stage": stage, "module": ""}
