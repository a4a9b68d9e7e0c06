"""What F writes into the model's state, and what several workers' writes become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx

from .graphs import Role, name_of, storage, tensors, touches
from .meta import of_node
from .user_line import user_line


class Write(NamedTuple):
    """How a tensor of the model's state is written.

    how: what it is at the end of a step, where several workers run F of its stage:
        "mean" of theirs (running statistics of BatchNorm and InstanceNorm), the "sum"
        of what they added to it (what is only ever added to), or None: each microbatch
        has to see the one before, as in eager PyTorch.
    where: the user's line that writes it.
    """

    how: str | None
    where: str


def find_writes(graph: fx.Graph) -> dict[int, Write]:
    """The state that a traced microbatch writes, by the input's index."""
    nodes = [n for n in graph.nodes if n.op.startswith("call")]
    writers: dict[int, list[fx.Node]] = {}
    for node in nodes:
        for where in {storage(t) for t in of_node(node).get("mutates", ())}:
            writers.setdefault(where, []).append(node)
    writes = {}
    for node in graph.find_nodes(op="placeholder"):
        mine = writers.get(storage(of_node(node)["val"]), [])
        if mine and of_node(node)["role"] is not Role.BATCH:
            line = str(user_line(mine[0].meta.get("stack_trace")))
            writes[of_node(node)["index"]] = Write(_how(node, mine, nodes), line)
    return writes


def touching(nodes: Sequence[fx.Node]) -> dict[int, list[fx.Node]]:
    """The calls that read or make memory which one of them writes into, by the storage:
    those up to the last write, or all, if it is an input's, which the next microbatch
    reads."""
    calls = [n for n in nodes if n.op.startswith("call")]
    last = {place: i for i, node in enumerate(calls) for place in _overwrites(node)}
    inputs = {
        storage(t)
        for n in nodes
        if n.op == "placeholder"
        for t in tensors(of_node(n).get("val"))
    }
    return {
        place: [
            node
            for node in (calls if place in inputs else calls[: end + 1])
            if touches(node, place)
        ]
        for place, end in last.items()
    }


def _overwrites(node: fx.Node) -> set[int]:
    """The storages of what a node reads that it writes into."""
    written = {storage(t) for t in of_node(node).get("mutates", ())}
    reads = (t for n in node.all_input_nodes for t in tensors(of_node(n).get("val")))
    return written.intersection(map(storage, reads)) if written else set()


def _how(state: fx.Node, writers: list[fx.Node], nodes: list[fx.Node]) -> str | None:
    memory = storage(of_node(state)["val"])
    if all(memory in map(storage, of_node(node).get("learns", ())) for node in writers):
        return "mean"
    touching = [node for node in nodes if touches(node, memory)]
    return "sum" if len(writers) == 1 and _adds(state, writers[0], touching) else None


def _adds(state: fx.Node, writer: fx.Node, touching: list[fx.Node]) -> bool:
    """Whether all that a step does with the state is to add to it.

    In place, `n.add_(x)`, or `copy_(n, add(n, x))`, as a new value for it becomes.
    """
    if of_node(state)["val"].dtype is torch.bool:
        return False
    if name_of(writer.target) == "add_":
        return touching == [writer] and writer.args[0] is state and _unread(writer)
    if name_of(writer.target) != "copy_" or not isinstance(writer.args[1], fx.Node):
        return False
    value = writer.args[1]
    reads = [arg for arg in value.args if arg is state]
    return (
        name_of(value.target) == "add"
        and len(reads) == 1
        and not (value.kwargs and value.args[0] is not state)
        and touching == [value, writer]
        and _unread(value, writer)
    )


def _unread(node: fx.Node, *readers: fx.Node) -> bool:
    """Whether no others compute with a value; the user may get it."""
    return all(user in readers or user.op == "output" for user in node.users)
