"""torch.vmap in Dynamo's graph, as the operations that it comes to.

FlexAttention's block masks are made with it. The only file that knows how Dynamo writes
torch.vmap down.

before: _vmap_increment_nesting(s0, "error"); i = _add_batch_dim(b, 0, 1)
        j = lengths[i]; m = _remove_batch_dim(j, 1, s0, 0); _vmap_decrement_nesting()
after:  j = index(lengths, [b]); m = j
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ..ir.graphs import is_mutable, is_view, tensors
from .spoken import Spoken

ENTER, EXIT = "_vmap_increment_nesting", "_vmap_decrement_nesting"


def flatten_vmaps(gm: fx.GraphModule) -> None:
    """Rewrites what torch.vmap does to values without gradients.

    Its other calls stay: tracing them would lose gradients of the model's own making.
    """
    for region in list(_regions(gm.graph)):
        inside = set(region)
        reads = dict.fromkeys(n for node in region for n in node.all_input_nodes)
        outer = [node for node in reads if node not in inside]
        values = [node.meta.get("example_value") for node in outer]
        if any(t.requires_grad for t in tensors(values)):
            continue
        results = [n for n in region if not inside.issuperset(n.users)]
        flat = _traced(gm, region, outer, values, results)
        _put(gm, flat, region, outer, results)


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The nodes of each outermost torch.vmap."""
    region, depth = list[fx.Node](), 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        depth += name == ENTER
        if depth:
            region.append(node)
        depth -= name == EXIT
        if region and not depth:
            yield region
            region = []


def _traced(
    gm: fx.GraphModule,
    region: Sequence[fx.Node],
    outer: Sequence[fx.Node],
    values: Sequence[Any],
    results: Sequence[fx.Node],
) -> fx.GraphModule:
    """The aten operations of a region: values of `outer` -> `results`."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in outer:
        new[node] = graph.placeholder(node.name)
    for node in region:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in results))
    inner = fx.Interpreter(fx.GraphModule(gm, graph))
    with torch.no_grad():
        trace = make_fx(inner.run, tracing_mode="symbolic", _allow_non_fake_inputs=True)
        traced: fx.GraphModule = trace(*values)
    traced.graph.eliminate_dead_code()
    seen = set[fx.Node]()
    for node in traced.graph.nodes:
        if node.op == "call_function":
            _write_nothing(node, seen)
        seen.add(node)
    return traced


def _write_nothing(node: fx.Node, before: Container[fx.Node]) -> None:
    """A write into what nothing else reads later becomes a value of its own.

    before: zeros = new_zeros(x, [2]); y = index_put_(zeros, [i], ones)
    after:  zeros = new_zeros(x, [2]); y = index_put(zeros, [i], ones)
    """
    func: Any = node.target
    if not is_mutable(func) or not isinstance(node.args[0], fx.Node):
        return
    name, written = func._schema.name.split("::")[1], node.args[0]
    plain = getattr(torch.ops.aten, name.removesuffix("_"), None)
    plain = getattr(plain, func._overloadname, None)
    made = written.op == "call_function" and not is_view(written.target)
    others = [user for user in written.users if user is not node]
    read = any(each not in before or is_view(each.target) for each in others)
    if plain and made and not read:
        node.target = plain


def _put(
    gm: fx.GraphModule,
    flat: fx.GraphModule,
    region: Sequence[fx.Node],
    outer: Sequence[fx.Node],
    results: Sequence[fx.Node],
) -> None:
    """Puts the operations in the place of a region."""
    inputs = flat.graph.find_nodes(op="placeholder")
    new: dict[fx.Node, Any] = dict(zip(inputs, outer, strict=True))
    known = next((n.meta for n in region if "stack_trace" in n.meta), {})
    for node in flat.graph.nodes:
        if node.op == "output":
            for old, value in zip(results, node.args[0], strict=True):
                old.replace_all_uses_with(new[value])
        elif node not in new:
            with gm.graph.inserting_before(region[0]):
                new[node] = _copied(gm, flat, node, new)
            value = node.meta.get("val")
            new[node].meta = {**known, "example_value": value}
    for node in reversed(region):
        gm.graph.erase_node(node)


def _copied(
    gm: fx.GraphModule, flat: fx.GraphModule, node: fx.Node, new: dict[fx.Node, Any]
) -> fx.Node:
    if node.op == "get_attr":
        name = f"constant_{node.name}_{len(gm.graph.nodes)}"
        value: Tensor = operator.attrgetter(str(node.target))(flat)
        gm.register_buffer(name, value)
        return gm.graph.get_attr(name)
    spoken = Spoken(node)
    args, kwargs = fx.map_arg((tuple(spoken.args), spoken.kwargs), new.__getitem__)
    return gm.graph.create_node(spoken.op, spoken.target, args, dict(kwargs))
