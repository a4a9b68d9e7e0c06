"""What a program holds of weights and gradients, counted on its nodes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from math import prod

from torch import fx

from fxsched.ir import ops

IN_PLACE = {
    ops.all_reduce: 0,
    ops.accumulate: 0,
    ops.update: 3,
    ops.renew: 1,
    ops.take: 3,
}  # where results go
COPIES = (ops.copy, ops.correct)


def most_held(program: fx.GraphModule, shared: Collection[int] = ()) -> Counter[str]:
    """The most bytes of each kind that are alive after any task's work, by walking the
    program; memory is what a value is made in, whatever names it has.

    shared: groups of inputs that all workers have, such as counts of labels, which are
        no worker's weights.
    """
    held: dict[fx.Node, tuple[str, int]] = {}
    home: dict[fx.Node, fx.Node] = {}  # whose memory a value is in
    names: Counter[fx.Node] = Counter()  # values alive in some memory
    most: Counter[str] = Counter()

    def note() -> None:
        now: Counter[str] = Counter()
        for kind, size in held.values():
            now[kind] += size
        most.update({kind: max(size - most[kind], 0) for kind, size in now.items()})

    for node in program.graph.nodes:
        if node.target is ops.free:
            note()
            for value in node.all_input_nodes:
                if value in home:
                    names[home[value]] -= 1
                    if not names[home[value]]:
                        held.pop(home[value], None)
            continue
        # a job makes all its gradients, though they are named one after the other
        for value in (node, *node.users) if node.op == "call_module" else (node,):
            kind = _kind(value)
            if value.op == "placeholder" and value.meta.get("group") in shared:
                continue
            if kind is None or value in home:
                continue
            home[value] = _home(value, home)
            names[home[value]] += 1
            if home[value] is value:
                held[value] = kind, _bytes(value)
    note()
    return most


def traffic(program: fx.GraphModule) -> tuple[int, int, int]:
    """Bytes that a program sends and that come to it, and how often jobs fetch weights,
    by its nodes. Copies that are renewed fetch new ones too."""
    nodes = list(program.graph.nodes)
    sent = [node.all_input_nodes[0] for node in nodes if node.target is ops.send]
    come = [node for node in nodes if node.target in (ops.recv, ops.fetch)]
    fetches = [
        node
        for node in come
        if node.target is ops.fetch
        and any(user.target not in (ops.renew, ops.free) for user in node.users)
    ]
    rings = 0  # of sums: 2 (W - 1) / W times the bytes, from one and to one
    for node in nodes:
        if node.target is ops.all_reduce:
            others = len(node.args[2])  # type: ignore[arg-type]
            rings += 2 * others * _bytes(node) // (others + 1)
    return (
        sum(map(_bytes, sent)) + rings,
        sum(map(_bytes, come)) + rings,
        len(fetches),
    )


def _home(node: fx.Node, home: dict[fx.Node, fx.Node]) -> fx.Node:
    """The value in whose memory a node's result is."""
    if node.target is ops.reduce:
        place, *sums = node.args
        return home[sums[place]]  # type: ignore[index]
    if node.target in IN_PLACE:
        return home[node.args[IN_PLACE[node.target]]]  # type: ignore[index]
    return node


def _kind(node: fx.Node) -> str | None:
    if node.op == "placeholder":
        return "weights" if "group" in node.meta else None
    if node.target is ops.fetch:
        return "fetched"
    if node.target in COPIES or _is_buffer(node):
        return "versions"
    if node.target in (ops.update, ops.renew, ops.take):
        return "weights"
    if node.target is ops.replica:  # a copy, or what is there anyway
        return "versions" if node.args[3] else None
    if node.target is ops.average or _is_replica(node):
        return "versions"
    if node.target in ops.VALUELESS:
        return None
    if node.target in (ops.accumulate, ops.reduce, ops.cast) or _is_sum(node):
        return "gradients"
    return None


def _is_buffer(node: fx.Node) -> bool:
    """Whether it is what F wrote into buffers, beside what they were."""
    call = node.args[0] if node.args else None
    job = call.meta.get("job") if isinstance(call, fx.Node) else None
    written = "group" in node.meta and node.op == "call_function"
    return written and job is not None and str(job.direction) == "F"


def _is_replica(node: fx.Node) -> bool:
    """Whether it is another worker's weights, or the mean of all."""
    averaged = any(user.target in (ops.average, ops.take) for user in node.users)
    return node.target is ops.recv and averaged


def _is_sum(node: fx.Node) -> bool:
    """Whether it is what a job gives, or another worker sends, of gradients; what is
    added to a sum is so as it is made."""
    if node.target is ops.recv:
        readers = {u.target for u in node.users} | {u.op for u in node.users}
        into = {ops.reduce, ops.update, ops.norms, "output"}
        return bool(node.meta["bundle"]) and bool(readers & into)
    adds = (u for u in node.users if u.target is ops.accumulate and u.args[1] is node)
    added = (u for u in adds if u.meta["task"] == node.meta["task"])
    return node.op == "call_function" and "group" in node.meta and not any(added)


def _bytes(node: fx.Node) -> int:
    return sum(prod(s.shape) * s.dtype.itemsize for s in node.meta["specs"])
