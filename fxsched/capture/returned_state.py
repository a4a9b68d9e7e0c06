"""State that the model writes, as more outputs of its graph.

before: m_1 = lerp(m, z, 0.1); y = z - m_1; copy_(m, m_1); return y
after:  m_1 = lerp(m, z, 0.1); y = z - m_1; return y, m_1

Nothing writes into what the call was given, so all microbatches read the same. Where
the batch goes into a version, rows of all microbatches do: it is made in a stage of the
global batch, or is the mean of the microbatches'. Other versions are the same in all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from ..ir.graphs import named_arguments
from ..ir.lazy import lazy_module
from ..ir.written import written
from .effects import refuse_recomputed, statistics_of, targets_of, written_by
from .functional import COPY, is_version
from .graph_inputs import origin_of, placeholders
from .returns import Returned

COUNT = "num_batches_tracked"


def written_state(gm: fx.GraphModule, inputs: Sequence[Any]) -> set[int]:
    """The positions of inputs that are state and written, but for weights that are
    trained and the statistics of normalizations."""
    nodes = placeholders(gm)
    index = {node: i for i, node in enumerate(nodes)}
    moved = [origin_of(n).name for node in gm.graph.nodes for n in statistics_of(node)]
    learned = {f"{name.removesuffix('running_mean')}{COUNT}" for name in moved}
    return {
        index[n]
        for node in gm.graph.nodes
        for n in written_by(node)
        if n in index
        and origin_of(n).name not in learned
        and not origin_of(n).argument
        and not inputs[index[n]].requires_grad
    }


def return_state(gm: fx.GraphModule, states: Collection[int]) -> fx.GraphModule:
    """A copy that returns the last versions of inputs and does not write into them;
    gm.meta["returns"] says which outputs they are."""
    graph, new = fx.Graph(), dict[fx.Node, Any]()
    index = {n: i for i, n in enumerate(placeholders(gm)) if i in states}
    kept: dict[int, fx.Node] = {}  # what writes, by the input's position
    for node in gm.graph.nodes:
        written_into = [n for n in written_by(node) if n in index]
        if written_into:
            refuse_recomputed(node)
            kept[index[written_into[0]]] = node
            new[node] = _version(graph, node, new)
        elif node.op != "output":
            new[node] = graph.node_copy(node, new.__getitem__)
    old: Any = gm.graph.output_node().args[0]
    returns, results = list(gm.meta["returns"]), list(old)
    for position, node in sorted(kept.items()):
        same = [i for i, each in enumerate(old) if each is node]
        for i in same:
            returns[i] = returns[i]._replace(version=position)
        if not same:
            results.append(node)
            name = origin_of(placeholders(gm)[position]).name
            returns.append(Returned(None, (name,), (), position, kept=True))
    output = graph.output(fx.map_arg(tuple(results), new.__getitem__))
    output.meta = dict(gm.graph.output_node().meta)
    result = lazy_module(gm, graph)
    result.meta.update(gm.meta, returns=tuple(returns))
    return result


def _version(graph: fx.Graph, node: fx.Node, new: dict[fx.Node, Any]) -> Any:
    """What an input is after a node has written into it."""
    if node.target is COPY and is_version(node.args[1], node.all_input_nodes[0]):
        return new[node.all_input_nodes[1]]
    call = fx.map_arg(named_arguments(node), new.__getitem__)
    args: Any = node.target, call, {name: [] for name in targets_of(node)}, ()
    version = graph.call_function(written, args)
    version.meta = dict(node.meta)
    return version
