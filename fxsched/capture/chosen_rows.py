"""What is computed on as many rows as values say becomes one operation of fixed sizes.

before: own = x[mask]; loss = cross_entropy(own @ w, labels[mask])      # own [u0, 32]
after:  loss = chosen_rows("4fd1..", [x, mask, w, labels], [])[0]

See ir/chosen.py. Rows of the batch meet there, so it is part of a global-batch stage.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import networkx as nx
import torch
from torch import Tensor, fx

from ..ir.chosen import Selection, cut_to_shape, keep_selection
from ..ir.lazy import lazy_module
from ..ir.modes import casts
from ..ir.regions import inside_regions, is_region
from ..ir.rewrites import extracted
from ..jobs.job import PlanError
from .masked_writes import PUTS, has_mask
from .refusals import is_open, where_of
from .returns import Returned

FILLED = "filled"  # node.meta of results that are filled up
SHAPES = "shapes"  # gm.meta: where the shape of an output that is filled up is


def choose_rows(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with an operation for each of its selections; outputs that are filled
    up have their shapes after all other outputs.

    A selection that can't be one stays: its first operation can't be planned.
    """
    for nodes in _selections(gm.graph):
        part = _Part.of(gm.graph, nodes)
        put = len(nodes) == 1 and has_mask(part.nodes[0])
        if put:
            _refuse_without_gradients(part)
        if put or _can_be_one(part):
            return choose_rows(_with_operation(gm, part))
    return gm


def cut_outputs(gm: fx.GraphModule, outputs: Sequence[Any]) -> Sequence[Any]:
    """What the user gets of a graph's outputs."""
    shapes: dict[int, int] = gm.meta.get(SHAPES, {})
    cut = [
        cut_to_shape(value, outputs[shapes[i]]) if i in shapes else value
        for i, value in enumerate(outputs)
    ]
    return cut[: len(outputs) - len(shapes)]


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _is_open(node: fx.Node) -> bool:
    """Whether a node has an open value, which isn't filled up."""
    return FILLED not in node.meta and is_open(node)


def _selections(graph: fx.Graph) -> list[set[fx.Node]]:
    """The nodes of each: those with open values, their readers, and all between; and
    each x[mask] = values, which has such a size in it."""
    inside = {node for node in graph.nodes if _is_open(node)}
    flow: nx.DiGraph[fx.Node] = nx.DiGraph()
    for node in graph.nodes if inside else ():
        if node.op != "output":
            flow.add_edges_from((read, node) for read in node.all_input_nodes)
    inside |= {reader for node in inside for reader in flow.successors(node)}
    lists = [node for node in inside if isinstance(_value(node), (tuple, list))]
    inside |= {item for node in lists for item in flow.successors(node)}
    before = set[fx.Node]().union(*(nx.ancestors(flow, node) for node in inside))
    after = set[fx.Node]().union(*(nx.descendants(flow, node) for node in inside))
    inside |= before & after
    parts = list(nx.weakly_connected_components(flow.subgraph(inside)))
    puts = [n for n in graph.nodes if n not in inside and has_mask(n)]
    parts += [{n} for n in puts if n.target is not PUTS[1]]  # of an input in place
    place = {node: i for i, node in enumerate(graph.nodes)}
    return sorted(map(set, parts), key=lambda part: min(map(place.__getitem__, part)))


class _Part(NamedTuple):
    """A part of a graph that becomes one operation.

    before, after: the nodes that stay before it, and after it.
    span: those between its first and its last that are not in it; all in order.
    reads, results: what it takes of others, and gives to them.
    """

    nodes: list[fx.Node]
    before: list[fx.Node]
    after: list[fx.Node]
    span: list[fx.Node]
    reads: list[fx.Node]
    results: list[fx.Node]

    @staticmethod
    def of(graph: fx.Graph, nodes: set[fx.Node]) -> _Part:
        every = list(graph.nodes)
        places = [i for i, node in enumerate(every) if node in nodes]
        own = [every[i] for i in places]
        span = [n for n in every[places[0] : places[-1]] if n not in nodes]
        readers = set(own)
        for node in span:
            if not readers.isdisjoint(node.all_input_nodes):
                readers.add(node)
        before = every[: places[0]] + [n for n in span if n not in readers]
        after = [n for n in span if n in readers] + every[places[-1] + 1 :]
        reads = dict.fromkeys(r for n in own for r in n.all_input_nodes)
        results = [n for n in own if any(user not in nodes for user in n.users)]
        reads_of_others = [read for read in reads if read not in nodes]
        return _Part(own, before, after, span, reads_of_others, results)


def _can_be_one(part: _Part) -> bool:
    """Whether it takes tensors and numbers and gives tensors, what it gives with sizes
    of its own is an output, and no region is between its nodes."""
    takes = [isinstance(_value(n), (Tensor, int, torch.SymInt)) for n in part.reads]
    gives = [isinstance(_value(n), Tensor) for n in part.results]
    opened = [n for n in part.results if _is_open(n)]
    readers = {user for n in opened for user in n.users if user not in part.nodes}
    return (
        all(takes)
        and all(gives)
        and all(user.op == "output" for user in readers)
        and not any(map(is_region, part.span))
        and not casts()
        and part.nodes[0] not in inside_regions(part.nodes[0].graph)
    )


def _refuse_without_gradients(part: _Part) -> None:
    """Raises PlanError for x[mask] = values in a block without gradients, if x is from
    before it: gradients of all of x go on, which the operation has none of."""
    put: Any = part.nodes[0]
    tensor = put.args[0] if put.target in PUTS else put.args[1]["self"]
    switches = [n for n in part.before if n.target is torch._C._set_grad_enabled]
    if switches and not switches[-1].args[0] and tensor < switches[-1]:
        raise PlanError(
            f"x[mask] = values is inside torch.no_grad{where_of(put)}, and x is from "
            "outside; write x = x.masked_scatter(mask, values) outside of torch.no_grad"
        )


def _with_operation(gm: fx.GraphModule, part: _Part) -> fx.GraphModule:
    graph, new = fx.Graph(), dict[fx.Node, Any]()
    for node in part.before:
        new[node] = graph.node_copy(node, new.__getitem__)
    values = [n for n in part.reads if isinstance(_value(n), Tensor)]
    numbers = [n for n in part.reads if n not in values]
    opened = [n for n in part.results if _is_open(n)]
    at = tuple(map(part.results.index, opened))
    reads = [*values, *numbers]
    own = extracted(gm, reads, part.nodes, part.results, "Selection")
    name = keep_selection(Selection(own, at))
    args = name, [new[n] for n in values], [new[n] for n in numbers]
    call = graph.call_function(torch.ops.fxsched.chosen_rows.default, args)
    examples = [*map(_value, part.results), *(_shape(_value(n)) for n in opened)]
    call.meta = {**part.nodes[0].meta, "example_value": examples, FILLED: True}
    items = []
    for i, example in enumerate(examples):
        items.append(graph.call_function(operator.getitem, (call, i)))
        items[i].meta = {**part.nodes[0].meta, "example_value": example}
    for i in at:
        items[i].meta[FILLED] = True
    new.update(zip(part.results, items, strict=False))
    for node in part.after:
        new[node] = graph.node_copy(node, new.__getitem__)
    result = lazy_module(gm, graph)
    result.meta.update(gm.meta)
    _add_shapes(result, gm, dict(zip(opened, items[len(part.results) :], strict=True)))
    return result


def _shape(value: Tensor) -> Tensor:
    return torch.empty(value.dim(), dtype=torch.int64, device="meta")


def _add_shapes(
    result: fx.GraphModule, gm: fx.GraphModule, shapes: dict[fx.Node, fx.Node]
) -> None:
    """Returns the shapes of open values after all that was returned."""
    old: Any = gm.graph.output_node().args[0]
    output = result.graph.output_node()
    new: Any = output.args[0]
    at = [i for i, node in enumerate(old) if node in shapes]
    output.args = ((*new, *(shapes[old[i]] for i in at)),)
    places = range(len(old), len(old) + len(at))
    known = gm.meta.get(SHAPES, {})
    result.meta[SHAPES] = {**known, **dict(zip(at, places, strict=True))}
    result.meta["returns"] = (*gm.meta["returns"], *(Returned() for _ in at))
