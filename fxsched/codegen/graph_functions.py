"""Flat graphs as a program calls them: with one list, and adding to running sums."""

from __future__ import annotations

import itertools
import linecache
import traceback
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize

import torch
from torch import fx

from ..ir.graphs import result

FlatFunction = Callable[[list[Any]], Any]
Runs = dict[tuple[int, ...], Callable[..., Any]]  # by the positions that are added
_known: WeakKeyDictionary[fx.GraphModule, Runs] = WeakKeyDictionary()
_flats: WeakValueDictionary[str, fx.GraphModule] = WeakValueDictionary()  # by file
_numbers = itertools.count()


def runner(flat: fx.GraphModule, positions: tuple[int, ...] = ()) -> FlatFunction:
    """A flat graph as a function of one list, which it empties: what a list alone
    holds is let go of after its last use, not after the call.

    The list has the graph's inputs, and a sum for each output at one of `positions`.
    Such an output is added to its sum, in place, as soon as it is there, and not
    returned: it is still in the cache then, and no gradient is held until the end.

    before: gradient = mm(a, b); ..; return (x, gradient)
    after:  a, b, sum_1 = given; gradient = mm(a, b); sum_1 += gradient; ..; return (x,)
    """
    known = _known.setdefault(flat, {})
    if positions not in known:
        graph = _adding(flat, positions)
        graph.set_codegen(_Listed())
        known[positions] = _function(graph, flat)
    return MethodType(known[positions], flat)


def failed_node(error: BaseException) -> fx.Node | None:
    """The node of a flat graph in which an error was raised, if it was in one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        flat = _flats.get(frame.filename)
        if flat is not None:
            name = (frame.line or "").split(" =")[0].split(":")[0]
            return next((n for n in flat.graph.nodes if n.name == name), None)
    return None


def _function(graph: fx.Graph, flat: fx.GraphModule) -> Callable[..., Any]:
    """The graph's code alone; a module would keep the graph."""
    code = graph.python_code("self")
    space, file = dict(code.globals), f"<fxsched graph {next(_numbers)}>"
    _flats[file] = flat
    linecache.cache[file] = len(code.src), None, code.src.splitlines(True), file
    exec(compile(code.src, file, "exec"), space)
    function: Callable[..., Any] = space.pop("forward")
    finalize(function, linecache.cache.pop, file, None).atexit = False
    return function


def _adding(flat: fx.GraphModule, positions: Sequence[int]) -> fx.Graph:
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in flat.graph.find_nodes(op="placeholder"):
        new[node] = graph.placeholder(node.name)
    outputs = result(flat)
    sums: dict[fx.Node, list[fx.Node]] = {}
    for position in positions:
        total = graph.placeholder(f"running_{position}")
        sums.setdefault(outputs[position], []).append(total)
    for node in flat.graph.nodes:
        if node.op == "output":
            continue
        if node not in new:
            new[node] = graph.node_copy(node, new.__getitem__)
        for total in sums.get(node, ()):
            graph.call_function(torch.ops.aten.add_.Tensor, (total, new[node]))
    returned = (out for i, out in enumerate(outputs) if i not in positions)
    graph.output(fx.map_arg(tuple(returned), new.__getitem__))
    return graph


class _Listed(fx.graph.CodeGen):
    """Code of a function that takes its arguments out of a list."""

    def gen_fn_def(self, free_vars: list[str], *rest: Any, **options: Any) -> str:
        names = "".join(f"{name}, " for name in free_vars if name != "self")
        taken = f"\n    {names}= given; given.clear()" if names else ""
        return f"def forward(self, given):{taken}"
