"""Moves values to the workers that read them."""

from __future__ import annotations

from typing import Any

from torch import fx

from .. import ops
from ..graphs import result
from ..request import Request


def insert_transfers(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """A send and a recv, at one point of the global order, for each foreign reader.

    before: a_0 = job_0F0[0]                                         # worker 0
            job_1F0 = self.forward_1((weights_1,), (a_0,), None)     # worker 1
    after:  a_0 = job_0F0[0]                                         # worker 0
            send(a_0, to=1, tag=3)                                   # worker 0
            recv_3 = recv(source=0, tag=3)                           # worker 1
            job_1F0 = self.forward_1((weights_1,), (recv_3,), None)  # worker 1

    A worker gets a value once, however many of its jobs read it.
    """
    tag = gm.meta["tags"]
    output = gm.graph.output_node()
    ranks = {rank: _leaves(own) for rank, own in result(gm).items()}
    for node in list(gm.graph.nodes):
        if node.op in ("placeholder", "output"):
            continue
        worker = node.meta["worker"]
        readers: dict[int, list[fx.Node]] = {}
        for user in node.users:
            if user is output:
                for rank, leaves in ranks.items():
                    if node in leaves and int(rank) != worker:
                        readers.setdefault(int(rank), [])
            elif user.meta["worker"] != worker:
                readers.setdefault(user.meta["worker"], []).append(user)
        last = node
        for to in sorted(readers):
            with gm.graph.inserting_after(last):
                send = gm.graph.call_function(ops.send, (node,), {"to": to, "tag": tag})
            with gm.graph.inserting_after(send):
                kwargs = {"source": worker, "tag": tag}
                last = recv = gm.graph.call_function(ops.recv, (), kwargs)
            recv.name = f"recv_{tag}"
            where = {"n": node.meta["n"], "task": node.meta["task"]}
            send.meta.update(where, worker=worker, specs=())
            kind = {key: node.meta[key] for key in ("specs", "bundle")}
            recv.meta.update(where | kind, worker=to)
            for user in readers[to]:
                user.replace_input_with(node, recv)
            results = dict(result(gm))
            results[str(to)] = _replaced(results[str(to)], node, recv)
            output.args = (results,)
            tag += 1
    gm.meta["tags"] = tag
    return gm


def _leaves(own: Any) -> set[fx.Node]:
    found: set[fx.Node] = set()
    fx.map_arg(own, found.add)
    return found


def _replaced(own: Any, old: fx.Node, new: fx.Node) -> Any:
    return fx.map_arg(own, lambda n: new if n is old else n)
