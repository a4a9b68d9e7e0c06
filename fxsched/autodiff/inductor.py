"""Compiles stage graphs with Inductor; the only file that knows it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..ir import ops
from ..ir.graphs import Spec, result
from ..ir.lazy import lazy_module
from ..ir.meta import of_node
from .stage_graphs import graph_text


class Compiled(torch.nn.Module):
    """A compiled stage graph in the place of the traced one."""

    def __init__(self, run: Callable[..., Any], random: bool, outputs: int) -> None:
        super().__init__()
        self.run, self.random, self.outputs = run, random, outputs

    def forward(self, *args: Any) -> Any:
        """What the stage's graph gives, with its job's random numbers."""
        if self.random:
            return ops.seeded(self.run, args[0].own, *args[1:])
        return self.run(*args)


def compile_stages(programs: Sequence[fx.GraphModule]) -> None:
    """Replaces the flat graphs of all stages; equal ones are compiled once.

    A graph with replicated draws stays as it is: Inductor draws all numbers of a graph
    from one seed.
    """
    by_id: dict[int, Compiled] = {}
    by_text: dict[str, Compiled] = {}
    for program in programs:
        for stage in program.children():
            for name, flat in list(stage.named_children()):
                if isinstance(flat, fx.GraphModule) and not _has_replicated(flat):
                    if id(flat) not in by_id:
                        by_id[id(flat)] = _compile(flat, by_text)
                    setattr(stage, name, by_id[id(flat)])


def _compile(flat: fx.GraphModule, done: dict[str, Compiled]) -> Compiled:
    graph, random = _unseeded(flat)
    text = graph_text(flat, graph)
    if text not in done:
        run = _inductor(lazy_module(flat, graph))
        done[text] = Compiled(run, random, len(result(flat)))
    return done[text]


def _inductor(gm: fx.GraphModule) -> Callable[..., Any]:
    """Compiles a graph, or finds it on disk, where torch.compile keeps its own too."""
    from torch._inductor.compile_fx import compile_fx  # slow to import, seldom needed

    # without a ShapeEnv, of which no symbol comes, Inductor's caches refuse a graph
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        nodes = gm.graph.find_nodes(op="placeholder")
        inputs = [Spec.of(of_node(node)["val"]).empty() for node in nodes]
    for node in gm.graph.nodes:
        node.meta = {}  # its values are of another mode
    with torch.no_grad(), tracing(TracingContext(mode)):
        compiled: Any = compile_fx(gm, inputs)
    # Dynamo is off where programs run; what turns it off takes 2 us a call
    run: Callable[..., Any] = getattr(compiled, "__wrapped__", compiled)
    return run


def _unseeded(flat: fx.GraphModule) -> tuple[fx.Graph, bool]:
    """The graph without seeds: Inductor draws its numbers from the default generator.

    before: own = seed[0]; mask = seeded(native_dropout, own + 0, x, 0.1, True)
    after:  mask = native_dropout(x, 0.1, True), the whole graph to be run seeded
    """
    graph = fx.Graph()
    new: dict[fx.Node, Any] = {}
    random = False
    for node in flat.graph.nodes:
        if node.op == "placeholder" and "val" not in of_node(node):
            random = True
        elif _is_seed(node):
            continue
        elif node.target is ops.wanting:  # Inductor gives all that is asked of it
            new[node] = new[node.args[0]]
        elif node.target is ops.seeded:
            target, _, *args = node.args
            args, kwargs = fx.map_arg((tuple(args), node.kwargs), new.__getitem__)
            new[node] = graph.call_function(target, args, kwargs)
            new[node].meta = dict(node.meta)
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
    return graph, random


def _is_seed(node: fx.Node) -> bool:
    """Whether a node makes a seed of the job's seeds."""
    first = node.args[0] if node.target in (operator.add, operator.getitem) else None
    return isinstance(first, fx.Node) and (first.name == "seed" or _is_seed(first))


def _has_replicated(flat: fx.GraphModule) -> bool:
    seeds = (n for n in flat.graph.nodes if n.target is operator.getitem)
    return any(_is_seed(node) and node.args[1] == 1 for node in seeds)
