"""A stage's flat graphs of F and B, parted from its joint graph.

F saves what B reads of it (residuals, in autodiff's words), but for weights and inputs,
which B is given as F was.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx

from ..ir import ops
from ..ir.facts import stage_facts
from ..ir.graphs import REPLICATED, Draw, Spec, base, draws, result
from ..ir.meta import of_node
from .gradient_strides import Strides
from .joint_graph import Joint, Source, drop_copies


class StageGraphs(NamedTuple):
    """A stage's graphs of F, B and W, on flat lists of tensors.

    forward: (state..., inputs...) -> (outputs..., new state..., saved...)
    backward: what `needs` lists -> (gradients of inputs, of state), None left out
    needs: what each argument of backward is: state, an input, saved or a tangent.
    weight: None, or, where the backward is split, what `weight_needs` lists ->
        gradients of state; backward then gives what is carried to it instead of them.
    weight_needs: what each argument of weight is: state or carried.
    mutated: indices of state that forward writes.
    state_gradients, input_gradients: of which state and inputs backward gives them.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    needs: tuple[Source, ...]
    mutated: tuple[int, ...]
    saved: tuple[Spec, ...]
    held: int  # bytes of memory that saved tensors take, views of inputs none
    own: tuple[bool, ...]  # whether an output has memory that nothing saved is in
    state_gradients: tuple[int, ...]
    input_gradients: tuple[int, ...]
    tangents: tuple[int, ...]  # outputs whose gradients backward is given
    random: bool
    weight: fx.GraphModule | None = None
    weight_needs: tuple[Source, ...] = ()
    carried: tuple[Spec, ...] = ()
    carried_bytes: int = 0  # of memory that carried tensors take
    strides: Mapping[int, Strides] = MappingProxyType({})  # of inputs' gradients that
    # aren't contiguous until they are sent
    views: Mapping[int, int] = MappingProxyType({})  # of saved tensors, of which input


def cast_gradients(graphs: StageGraphs, dtype: torch.dtype | None) -> None:
    """Lets a stage give gradients of state in the type that they are added up in.

    before: gw = t @ x; .. return (gx, gw)
    after:  gw = t @ x; cast = _to_copy(gw, dtype=float32); .. return (gx, cast)
    """
    flat = graphs.backward if graphs.weight is None else graphs.weight
    if flat is None or dtype is None:
        return
    output = flat.graph.output_node()
    results = list(result(flat))
    for i in range(len(results) - len(graphs.state_gradients), len(results)):
        node = results[i]
        fake = of_node(node)["val"]
        if fake.dtype == dtype:
            continue
        place = output if node.op == "placeholder" else node.next
        with flat.graph.inserting_before(place):
            copied = flat.graph.call_function(
                torch.ops.aten._to_copy.default, (node,), {"dtype": dtype}
            )
        of_node(copied)["val"] = fake.to(dtype)
        results[i] = copied
    output.args = (tuple(results),)


def stage_key(module: fx.GraphModule) -> str:
    """Text that is equal for stages that compute the same on the same shapes."""
    numbers = f"{stage_facts(module).places} {stage_facts(module).draws}"
    return f"{graph_text(module, module.graph)}\n{numbers}"


def graph_text(root: torch.nn.Module, graph: fx.Graph) -> str:
    """Text that is equal for graphs that compute the same on the same shapes; `root`
    has the constants that they read."""
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    lines = []
    regions: dict[Any, int] = {}  # that B computes again, numbered anew
    for node in graph.nodes:
        text = repr(fx.map_arg((node.args, node.kwargs), number.__getitem__))
        line = f"{node.op} {text}"
        if node.op == "placeholder":
            fake = of_node(node)["val"]
            line += f" {Spec.of(fake)!r} {fake.requires_grad}"
        else:
            line += f" {node.target} {id(node.target)}"
        if node.op == "get_attr":
            line += str(id(getattr(root, str(node.target), node)))
        if "recompute" in of_node(node):
            region = of_node(node)["recompute"]
            place = regions.setdefault(region, len(regions))
            line += f" again {place} {id(getattr(region, 'policy', None))}"
        lines.append(line)
    return "\n".join(lines)


class _Results(NamedTuple):
    """What the partitioner has F give."""

    outputs: dict[int, fx.Node]
    new_state: dict[int, fx.Node]
    residuals: dict[str, fx.Node]  # by name


class _Residuals(NamedTuple):
    """What B reads, and what of that F saves for it."""

    needs: list[Source]
    saved: list[fx.Node]


def arrange_graphs(
    joint: Joint,
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    state: int,
    live: tuple[bool, ...],
    drawn: Sequence[Draw],
) -> StageGraphs:
    """Arranges what the parts of a joint graph take and give.

    state: how many tensors of it there are. live: which outputs have gradients.
    drawn: the draws of the stage, with their numbers in the model.
    """
    results = _results(joint, forward)
    assert all(i < state for i in results.new_state), (
        "a stage writes into a value that it reads"
    )
    needs, saved = _residuals(joint, results, backward)
    mutated = sorted(results.new_state)
    outputs = [results.outputs[i] for i in sorted(results.outputs)]
    (output,) = forward.graph.find_nodes(op="output")
    output.args = ((*outputs, *(results.new_state[i] for i in mutated), *saved),)
    drop_copies(forward.graph)
    given = forward.graph.find_nodes(op="placeholder")[state:]
    views = {i: given.index(base(v)) for i, v in enumerate(saved) if base(v) in given}
    random = _seed_draws(forward.graph, drawn)
    _clear_pytree(forward)
    strides = _strides(joint, backward, state)
    weights, inputs = (
        _arrange_gradients(joint, backward, state) if backward else ([], [])
    )
    return StageGraphs(
        forward,
        backward,
        tuple(needs),
        tuple(mutated),
        tuple(Spec.of(of_node(v)["val"]) for v in saved),
        bytes_of(root for root in map(base, saved) if root.op != "placeholder"),
        tuple(base(each) not in {*map(base, saved)} for each in outputs),
        tuple(weights),
        tuple(inputs),
        tuple(i for i, wanted in enumerate(live) if wanted),
        random,
        strides=strides,
        views=views,
    )


def bytes_of(memory: Iterable[fx.Node]) -> int:
    """What these values take, each counted once."""
    return sum(Spec.of(of_node(value)["val"]).bytes for value in dict.fromkeys(memory))


def _results(joint: Joint, forward: fx.GraphModule) -> _Results:
    (output,) = forward.graph.find_nodes(op="output")
    flat: Any = output.args[0]
    count = len(joint.results)
    named = dict(zip(joint.results, flat[:count], strict=True))
    return _Results(
        {source.number: v for source, v in named.items() if source.what == "output"},
        {source.number: v for source, v in named.items() if source.what == "state"},
        {v.name: v for v in flat[count:]},
    )


def _residuals(
    joint: Joint, results: _Results, backward: fx.GraphModule | None
) -> _Residuals:
    """B must see the state that F saw: what F writes is saved like an activation."""
    known = {
        name: source
        for name, source in joint.arguments.items()
        if source.what != "state"
        or source.number not in results.new_state
        or name not in results.residuals
    }
    needs: list[Source] = []
    saved: list[fx.Node] = []
    read = backward.graph.find_nodes(op="placeholder") if backward else ()
    for node in read:
        source = known.get(node.name)
        if source is None:
            source = Source("saved", len(saved))
            saved.append(results.residuals[node.name])
        needs.append(source)
    return _Residuals(needs, saved)


def _clear_pytree(gm: fx.GraphModule) -> None:
    """Plain positional arguments and a tuple out, whatever AOTAutograd flattened."""
    gm.graph.set_codegen(fx.graph.CodeGen())
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()


def _arrange_gradients(
    joint: Joint, backward: fx.GraphModule, state: int
) -> tuple[list[int], list[int]]:
    """Orders backward's outputs: gradients of inputs, then of state.

    Gradients of inputs are made contiguous, to be sent as they are; those of state get
    memory of their own, because they are added to in place.
    """
    (output,) = backward.graph.find_nodes(op="output")
    gradients: dict[int, fx.Node] = {
        i: value
        for i, value in zip(joint.gradients, output.args[0], strict=True)
        if i is not None and value is not None
    }
    results: list[fx.Node] = []
    owned: set[fx.Node] = set()
    inputs = sorted(i for i in gradients if i >= state)
    weights = sorted(i for i in gradients if i < state)
    clone = torch.ops.aten.clone.default
    with backward.graph.inserting_before(output):
        for i in [*inputs, *weights]:
            value = gradients[i]
            fake = of_node(value)["val"]
            root = base(value)
            shared = root.op == "placeholder" or root in owned
            if not fake.is_contiguous() or (i < state and shared):
                kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format}
                value = backward.graph.call_function(clone, (value,), kwargs)
                of_node(value)["val"] = fake.contiguous()
                root = value
            owned.add(root)
            results.append(value)
    output.args = (tuple(results),)
    _clear_pytree(backward)
    return weights, [i - state for i in inputs]


def _strides(
    joint: Joint, backward: fx.GraphModule | None, state: int
) -> dict[int, Strides]:
    """Of the gradients of inputs, those that aren't contiguous."""
    if backward is None:
        return {}
    (output,) = backward.graph.find_nodes(op="output")
    return {
        i - state: of_node(value)["val"].stride()
        for i, value in zip(joint.gradients, output.args[0], strict=True)
        if i is not None and i >= state and value is not None
        if not of_node(value)["val"].is_contiguous()
    }


def _seed_draws(graph: fx.Graph, numbered: Sequence[Draw]) -> bool:
    """Gives each random operation a seed of its own, from the job's seeds.

    before: mask = native_dropout(x, 0.1, True)
    after:  own = seed[0]; mask = seeded(native_dropout, own + 0, x, 0.1, True)

    numbered: the draws of the stage; their numbers count from its first.
    """
    random = [n for n in graph.nodes if draws(n.target, n.args, n.kwargs)]
    if not random:
        return False
    with graph.inserting_before(next(iter(graph.nodes))):
        seeds = graph.placeholder("seed")
    for replicated in (False, True):
        nodes = [n for n in random if _is_replicated(n) is replicated]
        drawn = [n for n in nodes if not _drops_all(n)]
        numbers = [d.number for d in numbered if d.replicated is replicated]
        if len(numbers) != len(drawn):  # AOTAutograd draws otherwise: give it others
            numbers = [(i + 1) << 32 for i in range(len(drawn))]
        number = dict(zip(drawn, numbers, strict=True))
        if nodes:
            with graph.inserting_after(seeds):
                seed = graph.call_function(operator.getitem, (seeds, int(replicated)))
        for node in nodes:
            with graph.inserting_before(node):
                args = (seed, number.get(node, 0))
                node_seed = graph.call_function(operator.add, args)
                args = (node.target, node_seed, *node.args)
                new = graph.call_function(ops.seeded, args, node.kwargs)
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    return True


def _is_replicated(node: fx.Node) -> bool:
    return bool(of_node(node).get("custom", {}).get(REPLICATED))


def _drops_all(node: fx.Node) -> bool:
    """Whether a node is dropout of all, for which eager PyTorch draws nothing."""
    dropout = torch.ops.aten.native_dropout.default
    return node.target is dropout and bool(node.args[1] == 1)
