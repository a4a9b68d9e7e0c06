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
from ..ir.rewrites import added, rewritten
from ..ir.written import written
from .effects import refuse_recomputed, statistics_of, targets_of, written_by
from .functional import COPY, is_version
from .graph_inputs import origin_of, placeholders
from .returns import Returned

COUNT = "num_batches_tracked"


def written_state(gm: fx.GraphModule, inputs: Sequence[Any], once: bool) -> set[int]:
    """The positions of inputs that are state, written, and get new versions.

    once: whether all do, but for weights that are trained and what normalizations of
        microbatches write; else only what those of the whole batch do.
    """
    index = {node: i for i, node in enumerate(placeholders(gm))}
    writes, whole, moved = dict[str, int](), set[str](), set[str]()
    for node in gm.graph.nodes:
        for state in (n for n in written_by(node) if n in index):
            origin, trained = origin_of(state), inputs[index[state]].requires_grad
            if not origin.argument and not trained:
                writes[origin.name] = index[state]
                whole |= {origin.name} if "once" in node.meta else set()
        moved |= {origin_of(n).name for n in statistics_of(node)}
    names = set(writes) - _counts(moved) if once else whole | _counts(whole)
    return {i for name, i in writes.items() if name in names}


def _counts(statistics: Collection[str]) -> set[str]:
    """The counts of calls beside running means."""
    return {f"{name.removesuffix('running_mean')}{COUNT}" for name in statistics}


def return_state(gm: fx.GraphModule, states: set[int]) -> fx.GraphModule:
    """A copy that returns the last versions of inputs and does not write into them;
    gm.meta["returns"] says which outputs they are."""
    inputs, nodes = placeholders(gm), iter(gm.graph.nodes)
    versions: dict[int, fx.Node] = {}  # by the input's position
    old: Any = gm.graph.output_node().args[0]
    returns = list(gm.meta["returns"])

    def write(copy: fx.Node) -> fx.Node:
        node = next(nodes)
        into = [inputs.index(n) for n in written_by(node)[:1] if n in inputs]
        if states.isdisjoint(into):
            return copy
        refuse_recomputed(node)
        (position,) = into
        versions[position] = _version(copy)
        for i in (i for i, each in enumerate(old) if each is node):
            returns[i] = returns[i]._replace(version=position)
        return versions[position]

    result = rewritten(gm, write)
    output: Any = result.graph.output_node()
    results, told = list(output.args[0]), {each.version for each in returns}
    for position, version in sorted(versions.items()):
        if position not in told:
            results.append(version)
            name = origin_of(inputs[position]).name
            returns.append(Returned(None, (name,), (), position, kept=True))
    output.args = (tuple(results),)
    result.meta["returns"] = tuple(returns)
    return result


def _version(node: fx.Node) -> fx.Node:
    """What an input is after a node has written into it; takes the node's place."""
    graph, (state, *values) = node.graph, node.all_input_nodes
    if node.target is COPY and is_version(node.args[1], state):
        graph.erase_node(node)
        return values[0]
    paths = dict[str, Any]((name, []) for name in targets_of(node))
    args = node.target, named_arguments(node), paths, ()
    version = added(node, written, *args, value=node.meta["example_value"])
    graph.erase_node(node)
    return version
