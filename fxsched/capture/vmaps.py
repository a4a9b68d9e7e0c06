"""torch.vmap in a model's graph, as the operations that it comes to.

FlexAttention's block masks are made with it. The only file that knows how Dynamo writes
torch.vmap down.

before: _vmap_increment_nesting(s0, "error"); i = _add_batch_dim(b, 0, 1)
        j = lengths[i]; m = _remove_batch_dim(j, 1, s0, 0); _vmap_decrement_nesting()
after:  j = index(lengths, [b]); m = j
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from ..ir.graphs import name_of, tensors
from ..ir.rewrites import extracted

ENTER, EXIT = "_vmap_increment_nesting", "_vmap_decrement_nesting"


class Flat(NamedTuple):
    """The operations of a torch.vmap, which write into nothing.

    nodes: it. reads, results: what it takes of others, and gives to them.
    """

    gm: fx.GraphModule
    nodes: Sequence[fx.Node]
    reads: Sequence[fx.Node]
    results: Sequence[fx.Node]


def vmaps(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The nodes of each outermost torch.vmap of values without gradients.

    Others stay: tracing them would lose gradients of the model's own making.
    """
    region, depth = list[fx.Node](), 0
    for node in graph.nodes:
        depth += name_of(node.target) == ENTER
        if depth:
            region.append(node)
        depth -= name_of(node.target) == EXIT
        if region and not depth:
            values = [n.meta.get("example_value") for n in _reads(region)]
            if not any(t.requires_grad for t in tensors(values)):
                yield region
            region = []


def flat_vmaps(gm: fx.GraphModule) -> dict[fx.Node, Flat]:
    """What each torch.vmap comes to, also in bodies, by its first node."""
    graphs = [each for each in gm.modules() if isinstance(each, fx.GraphModule)]
    return {
        nodes[0]: _flat(each, nodes) for each in graphs for nodes in vmaps(each.graph)
    }


def _reads(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    reads = dict.fromkeys(n for node in nodes for n in node.all_input_nodes)
    return [node for node in reads if node not in nodes]


def _flat(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> Flat:
    reads = _reads(nodes)
    results = [n for n in nodes if not set(nodes).issuperset(n.users)]
    run: Any = fx.Interpreter(extracted(gm, reads, nodes, results)).run
    values = [node.meta.get("example_value") for node in reads]
    with torch.no_grad():
        for each in (lambda f: f, functionalize):
            run = make_fx(
                each(run), tracing_mode="symbolic", _allow_non_fake_inputs=True
            )(*values)
    return Flat(run, nodes, reads, results)
