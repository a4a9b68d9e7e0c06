"""From a stage's graph to its forward and backward graphs, by AOTAutograd.

The only file that knows AOTAutograd: it has the stage traced with its gradients into a
joint graph, reads what that graph's arguments and results are, and has it parted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext, tracing
from torch.fx.traceback import preserve_node_meta
from torch.overrides import TorchFunctionMode

from ..ir.facts import stage_facts
from ..ir.graphs import REPLICATED, Spec, name_of
from ..ir.lazy import all_lazy
from ..ir.meta import of_node
from ..ir.model_lines import LINE
from .equal_blocks import equal_pieces
from .fake_strides import true_strides
from .gradient_strides import Strides, restrided
from .joint_graph import (
    Joint,
    Source,
    recompute_in_backward,
    refuse_effects,
    reshape_views,
    want_captured,
)
from .linked_blocks import Linked
from .stage_graphs import StageGraphs, arrange_graphs, graph_text


def trace_stage(
    module: fx.GraphModule,
    live: tuple[bool, ...],
    state: int,
    mode: Any,
    blocks: dict[str, Joint],
) -> StageGraphs:
    """Traces a stage through AOTAutograd and parts it into forward and backward.

    live: which outputs have gradients. state: how many of the arguments are weights
    and buffers. mode: the fake mode of the stage's values. blocks: joint graphs of
    blocks that repeat, which are traced once and added here.
    """
    joint = _linked(module, live, state, mode, blocks)
    if joint is None:
        joint, views = _traced(module, live, state, mode)
        if views:
            copied = _calling(module, "clone", views)
            joint, _ = _traced(copied, live, state, mode)
    with _tracing(module.graph, live, mode):
        forward, backward = _parted(joint)
        draws = stage_facts(module).draws
        return arrange_graphs(joint, forward, backward, state, live, draws)


def _linked(
    module: fx.GraphModule,
    live: tuple[bool, ...],
    state: int,
    mode: Any,
    blocks: dict[str, Joint],
) -> Joint | None:
    """The joint graph of a stage whose blocks repeat, each block traced once; None for
    other stages."""
    pieces = equal_pieces(module, state)
    if not pieces:
        return None
    linked = Linked(module, live, state)
    for piece in reversed(pieces):
        wanted = linked.wants(piece)
        key = f"{wanted} {piece.state} {graph_text(piece.module, piece.module.graph)}"
        if key not in blocks:
            blocks[key], _ = _traced(piece.module, wanted, piece.state, mode)
        if not linked.add(piece, blocks[key]):
            return None
    return linked.joint()


def _traced(
    module: fx.GraphModule, live: tuple[bool, ...], state: int, mode: Any
) -> tuple[Joint, set[int]]:
    """The joint graph, and which outputs of it should have gradients but are views."""
    # none is computed for outputs that get no gradient
    dead = [i for i, wanted in enumerate(live) if not wanted]
    flat = _calling(module, "detach", dead)
    with _tracing(flat.graph, live, mode) as stack:
        gm = _joint_graph(flat, live, mode, stack)
        return _read(gm, state), _without_tangents(gm, live)


@contextlib.contextmanager
def _tracing(
    graph: fx.Graph, live: tuple[bool, ...], mode: Any
) -> Iterator[contextlib.ExitStack]:
    """What holds while AOTAutograd traces and parts a stage."""
    grad = torch.enable_grad() if any(live) else torch.no_grad()
    with (
        tracing(TracingContext(mode)),
        true_strides(mode),
        contextlib.ExitStack() as stack,
        grad,
        all_lazy(),
        _lstm_in_steps(graph),
    ):
        yield stack


def _joint_graph(
    flat: fx.GraphModule, live: tuple[bool, ...], mode: Any, stack: contextlib.ExitStack
) -> fx.GraphModule:
    with mode:
        arguments = tuple(
            Spec.of(of_node(n)["val"])
            .empty()
            .requires_grad_(of_node(n)["val"].requires_grad and any(live))
            for n in flat.graph.find_nodes(op="placeholder")
        )
    for number, node in enumerate(flat.graph.nodes):
        replicated = node.meta.get(REPLICATED, False)
        of_node(node)["custom"] = {LINE: number, REPLICATED: replicated}
    gm = aot_export_joint_with_descriptors(stack, _Tagged(flat), arguments).graph_module
    assert isinstance(gm, fx.GraphModule)
    refuse_effects(gm)
    reshape_views(gm.graph)
    want_captured(gm)
    return gm


def _read(gm: fx.GraphModule, state: int) -> Joint:
    """The joint graph with what its descriptors say of it."""
    arguments = {
        node.name: _argument(node.meta["desc"], state)
        for node in gm.graph.find_nodes(op="placeholder")
    }
    results: list[Source] = []
    gradients: list[int | None] = []
    (output,) = gm.graph.find_nodes(op="output")
    for desc in output.meta["desc"]:
        if desc is None:
            gradients.append(None)
        elif isinstance(desc, GradAOTOutput):
            gradients.append(_index(desc.grad_of))
        elif isinstance(desc, InputMutationAOTOutput):
            results.append(Source("state", _index(desc.mutated_input)))
        else:
            assert isinstance(desc, PlainAOTOutput), f"unknown output {desc}"
            results.append(Source("output", desc.idx))
    return Joint(gm, arguments, tuple(results), tuple(gradients))


def _argument(desc: Any, state: int) -> Source:
    if isinstance(desc, PlainAOTInput):
        if desc.idx < state:
            return Source("state", desc.idx)
        return Source("input", desc.idx - state)
    assert isinstance(desc, TangentAOTInput), f"unknown input {desc}"
    assert isinstance(desc.output, PlainAOTOutput), f"unknown {desc}"
    return Source("tangent", desc.output.idx)


def _index(desc: Any) -> int:
    """The position of a plain input; AOTAutograd knows others, which stages lack."""
    assert isinstance(desc, PlainAOTInput), f"unknown input {desc}"
    return desc.idx


def _parted(joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """Forward and backward; no backward where nothing has a gradient."""
    if all(i is None for i in joint.gradients):
        return joint.gm, None
    recompute_in_backward(joint)
    return default_partition(joint.gm, (), num_fwd_outputs=len(joint.results))


class _WholeStates(TorchFunctionMode):
    """An LSTM's last states in the shape of its first: taken apart, torch 2.11 and 2.12
    give them one dimension more."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.lstm.input:
            return result
        rows, *states = result
        pairs = zip(states, args[1], strict=True)
        return rows, *(s if s.shape == f.shape else s.view_as(f) for s, f in pairs)


@contextlib.contextmanager
def _lstm_in_steps(graph: fx.Graph) -> Iterator[None]:
    """Has AOTAutograd take an LSTM apart, where the graph has one.

    It would use oneDNN's layer otherwise, whose forward keeps what its backward needs
    only while autograd records, and F runs without autograd.
    """
    if all(n.target is not torch.ops.aten.lstm.input for n in graph.nodes):
        yield
        return
    onednn: Any = torch.backends.mkldnn
    with onednn.flags(enabled=False, allow_tf32=None), _WholeStates():
        yield


def _without_tangents(joint: fx.GraphModule, live: tuple[bool, ...]) -> set[int]:
    """Outputs whose gradients AOTAutograd leaves to its caller: views of inputs.

    Where a stage reads a copy in another layout than the model's value had,
    contiguous() and the like give back what they read.
    """
    tangents = {
        node.meta["desc"].output.idx
        for node in joint.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["desc"], TangentAOTInput)
        and isinstance(node.meta["desc"].output, PlainAOTOutput)
    }
    return {i for i, wanted in enumerate(live) if wanted} - tangents


def with_gradient_strides(
    module: fx.GraphModule, strides: Mapping[int, Strides]
) -> fx.GraphModule:
    """The stage, whose backward gives gradients of outputs these strides first."""
    for output, each in strides.items():
        module = _calling(module, restrided, (output,), None, each)
    return module


def _calling(
    module: fx.GraphModule,
    called: str | Callable[..., Any],
    outputs: Container[int],
    *args: Any,
) -> fx.GraphModule:
    """The stage with a method or a function called on some outputs.

    before: return (y, z)
    after:  return (y, z.clone())
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(module.graph, new)
    assert isinstance(results, tuple)
    for old, node in new.items():
        node.meta = dict(old.meta)
    op = "call_method" if isinstance(called, str) else "call_function"
    values = list(results)
    for i, value in enumerate(results):
        if i in outputs:
            values[i] = graph.create_node(op, called, (value, *args))
            of_node(values[i])["val"] = of_node(value).get("val")
    graph.output(tuple(values))
    result = fx.GraphModule(module, graph)
    result.meta = dict(module.meta)
    return result


class _Tagged(torch.nn.Module):
    """A stage whose nodes hand on to what they trace to, backward too, their number,
    and their meta["recompute"]."""

    def __init__(self, flat: fx.GraphModule) -> None:
        super().__init__()
        self.flat = flat

    def forward(self, *args: Any) -> Any:
        with preserve_node_meta():
            return _Run(self.flat).run(*args)


class _Run(fx.Interpreter):
    """Leaves out hooks on what gets no gradient in a stage: they would never run."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if name_of(target) == "register_hook" and not args[0].requires_grad:
            return args[0]
        return super().call_function(target, args, kwargs)
