"""A selection whose result adds up what experts give, as one for each shard.

before: z = zeros_like(x)
        z = index_add(z, 0, rows_0, x[rows_0] @ w_0)
        z = index_add(z, 0, rows_1, x[rows_1] @ w_1)
after:  z = index_add(zeros_like(x), 0, rows_0, x[rows_0] @ w_0)    # and 1 likewise
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import fx

from .chosen import SELECTIONS, Selection, keep_selection
from .lazy import lazy_module

aten = torch.ops.aten


@cache
def dealt(name: str, shards: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Each shard's selection, with the places of what it reads; () if it can't be."""
    selection = SELECTIONS[name]
    terms = _terms(selection)
    own = len(terms) // shards
    if not terms or len(terms) % shards:
        return ()
    every = (range(p * own, (p + 1) * own) for p in range(shards))
    return tuple(_of_shard(selection, terms, mine) for mine in every)


def _terms(selection: Selection) -> list[fx.Node]:
    """The nodes that each add what an expert gives to the one result, in their order;
    none if it is another."""
    graph = selection.gm.graph
    end = graph.output_node()
    (results,) = end.args
    if not isinstance(results, (list, tuple)) or len(results) != 1 or selection.open:
        return []
    result: Any = results[0]
    terms = list(_chain(result))[::-1]
    apart = all(len(term.users) == 1 for term in terms)
    plain = all(not n.kwargs and n.args[0] not in n.args[1:] for n in terms)
    return terms if apart and plain else []


def _chain(node: Any) -> Iterator[fx.Node]:
    while isinstance(node, fx.Node) and node.target is aten.index_add.default:
        yield node
        node = node.args[0]


def _of_shard(
    selection: Selection, terms: list[fx.Node], own: range
) -> tuple[str, tuple[int, ...]]:
    """A selection of some experts alone, and the places of what it reads."""
    base: Any = terms[0].args[0]
    graph, new = fx.Graph(), dict[fx.Node, Any]()
    graph.output(graph.graph_copy(selection.gm.graph, new))
    for i, term in enumerate(terms):
        if i not in own:
            new[term].replace_all_uses_with(new[term].args[0])
            graph.erase_node(new[term])
    if own.start:  # what they add to is added once
        with graph.inserting_after(new[base]):
            zeros = graph.call_function(aten.zeros_like.default, (new[base],))
        new[terms[own.start]].replace_input_with(new[base], zeros)
    inputs = graph.find_nodes(op="placeholder")
    graph.eliminate_dead_code(lambda node: node.op == "output")
    used = tuple(i for i, node in enumerate(inputs) if node.users)
    name = keep_selection(Selection(lazy_module(selection.gm, graph, "Selection"), ()))
    return name, used
