"""What several plans have in common is traced once by a process: the same models are
trained under many schedules, which often cut them alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import fx, nn

from fxsched import Backend, planning
from fxsched.autodiff.joint_graph import Joint
from fxsched.autodiff.stage_graphs import StageGraphs, stage_key
from fxsched.capture.trace import Traced
from fxsched.ir.graphs import Spec
from fxsched.ir.lazy import lazy_module
from fxsched.ir.modes import trace_modes
from fxsched.passes import differentiate

MOST = 100_000  # nodes of the graphs that are kept; about 5 KB each
Trace = Callable[..., StageGraphs]


class Switch:
    """A model that Dynamo traces once, for many backends."""

    def __init__(self, model: nn.Module, first: Backend) -> None:
        self.chosen = first
        switch = self

        class Switched(Backend):
            def run(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> Sequence[Any]:
                return switch.chosen.run(gm, args)

        self.compiled = torch.compile(model, backend=Switched(first.options))

    def __call__(self, backend: Backend, *inputs: Any) -> Any:
        self.chosen = backend
        return self.compiled(*inputs)


class Kept(NamedTuple):
    """A stage's graphs, and the stage: the key has the ids of what is in it."""

    graphs: StageGraphs
    stage: fx.GraphModule
    nodes: int


class StageCache:
    """Traces of stages, of which those not asked for longest are dropped first.

    A stage is known by its graph with shapes, types and constants, by which outputs
    have gradients, and by the modes of PyTorch that a trace depends on. Each call gets
    graphs of its own, which passes may change.
    """

    def __init__(self, trace: Trace, most: int = MOST) -> None:
        self.trace, self.most = trace, most
        self.kept: OrderedDict[Any, Kept] = OrderedDict()
        self.nodes = self.hits = 0

    def __call__(
        self,
        stage: fx.GraphModule,
        live: tuple[bool, ...],
        state: int,
        mode: Any,
        blocks: dict[str, Joint],
    ) -> StageGraphs:
        key = stage_key(stage), live, state, tuple(trace_modes())
        found = self.kept.get(key)
        if found is None:
            graphs = self.trace(stage, live, state, mode, blocks)
            found = Kept(graphs, stage, _count(graphs, stage))
            self.kept[key] = found
            self.nodes += found.nodes
            while self.nodes > self.most and len(self.kept) > 1:
                self.nodes -= self.kept.popitem(last=False)[1].nodes
        else:
            self.hits += 1
            self.kept.move_to_end(key)
        return _copied(found.graphs)


class MicrobatchCache:
    """Traces of microbatches of the last models, by the model's graph, what it is
    called with and how that is cut; each plan gets a graph of its own."""

    def __init__(self, trace: Callable[..., Traced], most: int = 100) -> None:
        self.trace, self.most = trace, most
        self.kept: OrderedDict[Any, tuple[fx.GraphModule, Traced]] = OrderedDict()

    def __call__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], *options: Any
    ) -> Traced:
        called = [
            (Spec.of(x), x.requires_grad) if torch.is_tensor(x) else x for x in inputs
        ]
        key = id(gm), str(called), str(options), tuple(trace_modes())
        if key not in self.kept:
            traced = self.trace(gm, inputs, *options)
            if not _is_in_order(traced.graph.graph):
                return traced
            self.kept[key] = gm, traced
            if len(self.kept) > self.most:
                self.kept.popitem(last=False)
        _, traced = self.kept[key]
        return traced._replace(graph=_copy(traced.graph))


CACHE = StageCache(differentiate.trace_stage)  # of this process
MICROBATCHES = MicrobatchCache(planning.trace_microbatch)


@contextmanager
def stages_traced_once(cache: StageCache = CACHE) -> Iterator[StageCache]:
    """Where what any plan of this process had before is not traced again."""
    with _tracing_by(cache, MICROBATCHES):
        yield cache


@contextmanager
def stages_traced_anew() -> Iterator[None]:
    """Where each plan traces its own stages, as users' plans do."""
    with _tracing_by(CACHE.trace, MICROBATCHES.trace):
        yield


@contextmanager
def _tracing_by(stages: Trace, microbatches: Callable[..., Traced]) -> Iterator[None]:
    with (
        patch.object(differentiate, "trace_stage", stages),
        patch.object(planning, "trace_microbatch", microbatches),
    ):
        yield


def _graphs(graphs: StageGraphs) -> dict[str, fx.GraphModule]:
    return {
        name: value
        for name, value in graphs._asdict().items()
        if isinstance(value, fx.GraphModule)
    }


def _count(graphs: StageGraphs, stage: fx.GraphModule) -> int:
    return sum(len(gm.graph.nodes) for gm in (stage, *_graphs(graphs).values()))


def _copied(graphs: StageGraphs) -> StageGraphs:
    return graphs._replace(**{k: _copy(gm) for k, gm in _graphs(graphs).items()})


def _is_in_order(graph: fx.Graph) -> bool:
    """Whether each node comes after what it reads, as a copy must have it; values of
    the whole batch may come later."""
    seen = set[fx.Node]()
    for node in graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            return False
        seen.add(node)
    return True


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """The module with a graph of its own, whose nodes have the same names and values
    of fake tensors."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.output_node().meta = dict(gm.graph.output_node().meta)
    copied = lazy_module(gm, graph, type(gm).__name__)
    copied.meta = dict(gm.meta)
    return copied
