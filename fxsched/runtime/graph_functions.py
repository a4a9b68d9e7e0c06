"""Flat graphs as a program calls them: with one list, and adding to running sums."""

from __future__ import annotations

import itertools
import linecache
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize

import torch
from torch import fx

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
        with _adding(flat.graph, positions):
            code = flat.graph.python_code("self")
        known[positions] = _function(code, flat)
    return MethodType(known[positions], flat)


def failed_node(error: BaseException) -> fx.Node | None:
    """The node of a flat graph in which an error was raised, if it was in one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        flat = _flats.get(frame.filename)
        if flat is not None:
            name = (frame.line or "").split(" =")[0].split(":")[0]
            return next((n for n in flat.graph.nodes if n.name == name), None)
    return None


def _function(code: fx.graph.PythonCode, flat: fx.GraphModule) -> Callable[..., Any]:
    """The code alone; a module would keep the graph."""
    space, file = dict(code.globals), f"<fxsched graph {next(_numbers)}>"
    _flats[file] = flat
    linecache.cache[file] = len(code.src), None, code.src.splitlines(True), file
    exec(compile(code.src, file, "exec"), space)
    function: Callable[..., Any] = space.pop("forward")
    finalize(function, linecache.cache.pop, file, None).atexit = False
    return function


@contextmanager
def _adding(graph: fx.Graph, positions: Sequence[int]) -> Iterator[None]:
    """While it is open, a flat graph takes a list, and adds to sums; a copy of it would
    take longer than its code."""
    output, own = graph.output_node(), graph._codegen
    returned: Any = output.args
    outputs, new = returned[0], list[fx.Node]()
    first = next(node for node in graph.nodes if node.op != "placeholder")
    try:
        with graph.inserting_before(first):
            new += [graph.placeholder(f"running_{i}") for i in positions]
        for total in new:
            total.target = total.name  # another, if one was called so before
        for total, position in zip(tuple(new), positions, strict=True):
            made = outputs[position]
            with graph.inserting_after(new[-1] if made.op == "placeholder" else made):
                add = torch.ops.aten.add_.Tensor
                new.append(graph.call_function(add, (total, made)))
        output.args = (tuple(o for i, o in enumerate(outputs) if i not in positions),)
        graph.set_codegen(_Listed())
        yield
    finally:
        output.args = returned
        for node in reversed(new):
            graph.erase_node(node)
        graph.set_codegen(own)


class _Listed(fx.graph.CodeGen):
    """Code of a function that takes its arguments out of a list."""

    def gen_fn_def(self, free_vars: list[str], *rest: Any, **options: Any) -> str:
        names = "".join(f"{name}, " for name in free_vars if name != "self")
        taken = f"\n    {names}= given; given.clear()" if names else ""
        return f"def forward(self, given):{taken}"
