"""Which values read memory that others write into, all of them before."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

from torch import fx

from ..ir.graphs import storage, tensors


def after_writes(
    nodes: Sequence[fx.Node], writes: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """Nodes that read what is written, and that no shard can see too early.

    All that writes comes before them, of what was there when the memory was made: so it
    is in the same piece of a stage.

    writes: whether a node writes into what it reads.
    """
    place = {node: i for i, node in enumerate(nodes)}
    last: dict[int, int] = {}
    late: set[int] = set()  # memory whose writers wait for more than its maker
    maker: dict[int, fx.Node] = {}
    for node in nodes:
        for where in _memory(node):
            maker.setdefault(where, node)
        if writes(node):
            for where in {storage(t) for t in node.meta["mutates"]}:
                last[where] = place[node]
                first = maker.get(where)
                if first is None or not _is_early(node, first):
                    late.add(where)
    found = set()
    for node in nodes:
        reads = {w for n in node.all_input_nodes for w in _memory(n)} & last.keys()
        settled = all(last[w] < place[node] and w not in late for w in reads)
        if reads and settled and last.keys().isdisjoint(_memory(node)):
            found.add(node)
    return found


def settled_reads(
    nodes: Sequence[fx.Node], written: set[fx.Node], weighed: Container[fx.Node]
) -> set[fx.Node]:
    """Those that give new memory of what was written into before them, such as
    labels that are shifted, by nodes that no shard waits for.

    written: nodes that touch what is written into. weighed: those that come of weights.
    """
    first = {n for n in nodes if "stage" not in n.meta}  # before shards read each other
    last: dict[int, int] = {}
    for i, node in enumerate(nodes):
        mutates = node.meta.get("mutates", ())
        near = node in written or mutates
        if near and node not in weighed and first.issuperset(node.all_input_nodes):
            first.add(node)
        for t in mutates:
            end = i if node in first else len(nodes)
            last[storage(t)] = max(end, last.get(storage(t), 0))
    settled = set[fx.Node]()
    for i, node in enumerate(nodes):
        own = _memory(node)
        reads = [read for read in node.all_input_nodes if _memory(read) & set(last)]
        ends = [last.get(each, 0) for read in reads for each in _memory(read)]
        if (
            own.isdisjoint(last)
            and first.issuperset(reads)
            and max(ends, default=0) < i
        ):
            settled.add(node)
    return settled


def _is_early(writer: fx.Node, maker: fx.Node) -> bool:
    """Whether what a node writes was there before the memory that it writes into."""
    if maker.op == "placeholder":  # whose memory is there on all shards
        return False
    before, queue = {maker}, [maker]
    while queue:
        fresh = [n for n in queue.pop().all_input_nodes if n not in before]
        before.update(fresh)
        queue += fresh
    reads = writer.all_input_nodes
    return all(
        n in before or _is_view(n, maker) or not n.all_input_nodes for n in reads
    )


def _is_view(node: fx.Node, maker: fx.Node) -> bool:
    return not _memory(maker).isdisjoint(_memory(node)) and (
        set(node.all_input_nodes) <= {maker}
    )


def _memory(node: fx.Node) -> set[int]:
    return set(_storages(node))


def _storages(node: fx.Node) -> Iterator[int]:
    return map(storage, tensors(node.meta.get("val")))
