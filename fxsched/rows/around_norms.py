"""What runs on all rows together with the BatchNorms of a model.

What lies between two of them does: with a BatchNorm after each of 20 convolutions,
microbatches would wait for each other 20 times. What comes before the first and after
the last does too, where it is less work.

before: a = conv(x); b = norm(a); c = conv(b); d = norm(c); loss = f(d)
after:  all of that but a long f in one stage of the global batch
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import networkx as nx
from torch import fx


def around_norms(
    nodes: Sequence[fx.Node],
    met: Collection[fx.Node],
    seconds: Callable[[fx.Node], float],
) -> set[fx.Node]:
    """The BatchNorms that run on all rows, and these nodes around them.

    nodes: that compute, in order. met: where rows meet in other ways. seconds: of each.
    """
    norms = [n for n in nodes if "norm" in n.meta]
    if not norms:
        return set()
    flow: nx.DiGraph[fx.Node] = nx.DiGraph()
    flow.add_nodes_from(nodes)
    flow.add_edges_from((p, n) for n in nodes for p in n.all_input_nodes if p in flow)
    core = _reached(flow, norms) & _reached(flow.reverse(copy=False), norms)
    apart = flow.subgraph(n for n in nodes if n not in met or n in core)
    around = set(core)
    for part in nx.weakly_connected_components(flow.subgraph(core)):
        work = sum(map(seconds, part))
        for way in (apart.reverse(copy=False), apart):
            more = _reached(way, part) - core
            if sum(map(seconds, more)) <= work:
                around |= more
    return around


def _reached(flow: nx.DiGraph[fx.Node], starts: Iterable[fx.Node]) -> set[fx.Node]:
    """The starts, and all that is reached from them."""
    return {node for layer in nx.bfs_layers(flow, [*starts]) for node in layer}
