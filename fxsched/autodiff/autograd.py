"""From a stage's graph to its forward and backward graphs, by AOTAutograd.

The only file that knows AOTAutograd.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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

from ..ir import ops
from ..ir.facts import stage_facts
from ..ir.graphs import Spec, base, draws
from ..ir.lazy import all_lazy
from ..jobs import PlanError
from .activation_checkpoints import is_forward, recomputed


class Pair(NamedTuple):
    """A stage's forward and backward graph, on flat lists of tensors.

    forward: (state..., inputs...) -> (outputs..., new state..., saved...)
    backward: what `needs` lists -> (gradients of inputs, of state), None left out
    needs: for each argument of backward, what it is and which: ("state", 3),
        ("input", 0), ("saved", 2) or ("tangent", 0).
    weight: None, or, where the backward is split, what `weight_needs` lists ->
        gradients of state; backward then gives what is carried to it instead of them.
    weight_needs: for each argument of weight, ("state", 3) or ("carried", 0).
    mutated: indices of state that forward writes.
    gradients: indices of the state, then of the inputs, that backward gives.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    needs: tuple[tuple[str, int], ...]
    mutated: tuple[int, ...]
    saved: tuple[Spec, ...]
    held: int  # bytes of memory that saved tensors take, views of inputs none
    state_gradients: tuple[int, ...]
    input_gradients: tuple[int, ...]
    tangents: tuple[int, ...]  # outputs whose gradients backward is given
    random: bool
    weight: fx.GraphModule | None = None
    weight_needs: tuple[tuple[str, int], ...] = ()
    carried: tuple[Spec, ...] = ()
    carried_bytes: int = 0  # of memory that carried tensors take


def stage_key(module: fx.GraphModule) -> str:
    """Text that is equal for stages that compute the same on the same shapes."""
    numbers = f"{stage_facts(module).places} {stage_facts(module).draws}"
    return f"{graph_text(module, module.graph)}\n{numbers}"


def graph_text(root: torch.nn.Module, graph: fx.Graph) -> str:
    """Text that is equal for graphs that compute the same on the same shapes; `root`
    has the constants that they read."""
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    lines = []
    regions: dict[int, int] = {}  # of torch.utils.checkpoint, numbered anew
    for node in graph.nodes:
        text = repr(fx.map_arg((node.args, node.kwargs), number.__getitem__))
        line = f"{node.op} {text}"
        if node.op == "placeholder":
            fake = node.meta["val"]
            line += f" {Spec.of(fake)!r} {fake.requires_grad}"
        else:
            line += f" {node.target} {id(node.target)}"
        if node.op == "get_attr":
            line += str(id(getattr(root, str(node.target), node)))
        if "recompute" in node.meta:
            region = node.meta["recompute"]
            line += f" again {regions.setdefault(region, len(regions))}"
        lines.append(line)
    return "\n".join(lines)


def trace_stage(
    module: fx.GraphModule,
    live: tuple[bool, ...],
    state: int,
    mode: Any,
    copied: bool = False,
) -> Pair:
    """Traces a stage through AOTAutograd and parts it into forward and backward."""
    flat = _without_dead_tangents(module, live)
    with mode:
        arguments = tuple(
            Spec.of(n.meta["val"])
            .empty()
            .requires_grad_(n.meta["val"].requires_grad and any(live))
            for n in flat.graph.find_nodes(op="placeholder")
        )
    grad = torch.enable_grad() if any(live) else torch.no_grad()
    with (
        tracing(TracingContext(mode)),
        contextlib.ExitStack() as stack,
        grad,
        all_lazy(),
        _lstm_in_steps(flat.graph),
    ):
        tagged = any("recompute" in node.meta for node in flat.graph.nodes)
        run = _Tagged(flat) if tagged else flat
        exported = aot_export_joint_with_descriptors(stack, run, arguments)
        joint = exported.graph_module
        assert isinstance(joint, fx.GraphModule)
        _refuse_effects(joint)
        _reshape(joint.graph)
        same = _without_tangents(joint, live)
        (output,) = joint.graph.find_nodes(op="output")
        results = [
            d
            for d in output.meta["desc"]
            if not (d is None or isinstance(d, GradAOTOutput))
        ]
        if any(isinstance(d, GradAOTOutput) for d in output.meta["desc"]):
            _recompute(joint, state)
            forward, backward = default_partition(
                joint, (), num_fwd_outputs=len(results)
            )
        else:
            forward, backward = joint, None
    if same and not copied:
        copies = _copying(module, same)
        return trace_stage(copies, live, state, mode, copied=True)
    numbers = stage_facts(module).draws
    return _pair_of(joint, forward, backward, results, state, live, numbers)


@contextlib.contextmanager
def _lstm_in_steps(graph: fx.Graph) -> Iterator[None]:
    """Has AOTAutograd take an LSTM apart, where the graph has one.

    It would use oneDNN's layer otherwise, whose forward keeps what its backward needs
    only while autograd records, and F runs without autograd.
    """
    onednn: Any = torch.backends.mkldnn
    enabled = onednn.enabled
    if any(getattr(n.target, "__name__", "") == "lstm" for n in graph.nodes):
        onednn.enabled = False
    try:
        yield
    finally:
        if onednn.enabled != enabled:
            onednn.enabled = enabled


def _without_dead_tangents(
    module: fx.GraphModule, live: tuple[bool, ...]
) -> fx.GraphModule:
    """The stage with outputs that get no gradient detached: none is computed."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(module.graph, new)
    assert isinstance(results, tuple)
    detached = [
        value if wanted else graph.call_method("detach", (value,))
        for value, wanted in zip(results, live, strict=True)
    ]
    graph.output(tuple(detached))
    for old, node in new.items():
        node.meta = dict(old.meta)
    return fx.GraphModule(module, graph)


def _without_tangents(joint: fx.GraphModule, live: tuple[bool, ...]) -> set[int]:
    """Outputs whose gradients AOTAutograd leaves to its caller: views of inputs.

    Where a stage reads a copy in another layout than the model's value had,
    contiguous() and the like give back what they read.
    """
    given = {
        node.meta["desc"].output.idx
        for node in joint.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["desc"], TangentAOTInput)
        and isinstance(node.meta["desc"].output, PlainAOTOutput)
    }
    return {i for i, wanted in enumerate(live) if wanted} - given


def _copying(module: fx.GraphModule, outputs: set[int]) -> fx.GraphModule:
    """The stage with copies of some outputs.

    before: return (y, z)
    after:  return (y, z.clone())
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(module.graph, new)
    assert isinstance(results, tuple)
    for old, node in new.items():
        node.meta = dict(old.meta)
    copied = []
    for i, value in enumerate(results):
        copied.append(graph.call_method("clone", (value,)) if i in outputs else value)
    graph.output(tuple(copied))
    result = fx.GraphModule(module, graph)
    result.meta = dict(module.meta)
    return result


def _refuse_effects(joint: fx.GraphModule) -> None:
    """Raises PlanError for operations that do more than give values."""
    found = [
        str(node.args[1])
        for node in joint.graph.nodes
        if getattr(node.target, "__name__", "") == "with_effects"
    ]
    if found:
        raise PlanError(
            f"the model calls {', '.join(dict.fromkeys(found))}, which does more than "
            "give tensors (it prints, or raises for some values), as planned steps do; "
            "leave it out, or take what only computes (torch.linalg's _ex functions)"
        )


def _reshape(graph: fx.Graph) -> None:
    """Has views copy where their source has other strides than it was traced with.

    Some operations do: mse_loss_backward gives contiguous gradients, and claims the
    strides of its input.

    before: g = mse_loss_backward(1, y, z); gx = view(t(g), (8,))
    after:  g = mse_loss_backward(1, y, z); gx = reshape(t(g), (8,))
    """
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        if not base(node).meta["val"].is_contiguous():
            node.target = aten.reshape.default


class _Tagged(torch.nn.Module):
    """A stage whose nodes hand their meta["recompute"] on to what they trace to."""

    def __init__(self, flat: fx.GraphModule) -> None:
        super().__init__()
        self.flat = flat

    def forward(self, *args: Any) -> Any:
        with preserve_node_meta():
            return fx.Interpreter(self.flat).run(*args)


def _recompute(joint: fx.GraphModule, state: int) -> None:
    """Computes again in backward what depends on the state alone, such as w.t(), and
    what torch.utils.checkpoint marks.

    before: t = w.t(); y = x @ t; gx = gy @ t.t()
    after:  t = w.t(); y = x @ t; t2 = w.t(); gx = gy @ t2.t()
    """
    graph = joint.graph
    derived: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            index = getattr(node.meta["desc"], "idx", state)
            if isinstance(node.meta["desc"], PlainAOTInput) and index < state:
                derived[node] = None
        elif node.op == "call_function" and is_forward(node):
            read = node.all_input_nodes
            if (
                read
                and not draws(node.target, node.args, node.kwargs)
                and all(p in derived for p in read)
            ):
                derived[node] = None
    derived.update(recomputed(graph))
    copies: dict[fx.Node, fx.Node] = {}

    def again(node: fx.Node, before: fx.Node) -> fx.Node:
        if node.op == "placeholder" or node not in derived:
            return node
        if node not in copies:
            for read in node.all_input_nodes:
                again(read, before)
            with graph.inserting_before(before):
                copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
            copies[node].meta = {
                k: v for k, v in node.meta.items() if k != "partitioner_tag"
            } | {"partitioner_tag": "is_backward"}
        return copies[node]

    for node in list(graph.nodes):
        if node.op == "call_function" and not is_forward(node):
            for read in node.all_input_nodes:
                if read in derived:
                    node.replace_input_with(read, again(read, node))
    for node in graph.nodes:  # the partitioner has a way of its own with it
        node.meta.pop("recompute", None)
    joint.recompile()


def _pair_of(
    joint: fx.GraphModule,
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    results: list[Any],
    state: int,
    live: tuple[bool, ...],
    numbers: Sequence[int],
) -> Pair:
    """Sorts out what the parts take and give; weights and inputs are not saved."""
    names: dict[str, tuple[str, int]] = {}
    for node in joint.graph.find_nodes(op="placeholder"):
        desc: Any = node.meta["desc"]
        if isinstance(desc, PlainAOTInput):
            index = desc.idx
            names[node.name] = (
                ("state", index) if index < state else ("input", index - state)
            )
        else:
            assert isinstance(desc, TangentAOTInput), f"unknown input {desc}"
            assert isinstance(desc.output, PlainAOTOutput), f"unknown {desc}"
            names[node.name] = ("tangent", desc.output.idx)
    (given,) = forward.graph.find_nodes(op="output")
    flat: Any = given.args[0]
    plain = {
        d.idx: v
        for d, v in zip(results, flat, strict=False)
        if isinstance(d, PlainAOTOutput)
    }
    mutated = {
        _index(d.mutated_input): v
        for d, v in zip(results, flat, strict=False)
        if isinstance(d, InputMutationAOTOutput)
    }
    assert len(plain) + len(mutated) == len(results), f"unknown outputs in {results}"
    assert all(i < state for i in mutated), "a stage writes into a value that it reads"
    kept = {v.name: v for v in flat[len(results) :]}
    for i in mutated:  # B must see the state that F saw: save it like an activation
        name = next(n for n, where in names.items() if where == ("state", i))
        if name in kept:
            names.pop(name)
    needs: list[tuple[str, int]] = []
    saved: list[fx.Node] = []
    if backward is not None:
        for node in backward.graph.find_nodes(op="placeholder"):
            where = names.get(node.name)
            if where is None:
                where = ("saved", len(saved))
                saved.append(kept[node.name])
            needs.append(where)
    order = sorted(mutated)
    given.args = (
        (*(plain[i] for i in sorted(plain)), *(mutated[i] for i in order), *saved),
    )
    _drop_copies(forward.graph)
    random = _seed_random_numbers(forward.graph, numbers)
    _clear_pytree(forward)
    state_gradients: list[int] = []
    input_gradients: list[int] = []
    if backward is not None:
        state_gradients, input_gradients = _arrange_gradients(joint, backward, state)
    return Pair(
        forward,
        backward,
        tuple(needs),
        tuple(order),
        tuple(Spec.of(v.meta["val"]) for v in saved),
        sum(
            Spec.of(root.meta["val"]).bytes
            for root in dict.fromkeys(map(base, saved))
            if root.op != "placeholder"
        ),
        tuple(state_gradients),
        tuple(input_gradients),
        tuple(i for i, wanted in enumerate(live) if wanted),
        random,
    )


def _drop_copies(graph: fx.Graph) -> None:
    """Without copies of what nothing else reads, such as dropout's with p=0.

    before: y = mm(a, b); z = clone(y); return z + x
    after:  y = mm(a, b); return y + x
    """
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.aten.clone.default
    ):
        (source,) = node.all_input_nodes
        if (
            source.op == "call_function"
            and len(source.users) == 1
            and Spec.of(source.meta["val"]) == Spec.of(node.meta["val"])
            and all(user.op != "output" for user in node.users)
        ):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _index(desc: Any) -> int:
    """The position of a plain input; AOTAutograd knows others, which stages lack."""
    assert isinstance(desc, PlainAOTInput), f"unknown input {desc}"
    return desc.idx


def _clear_pytree(gm: fx.GraphModule) -> None:
    """Plain positional arguments and a tuple out, whatever AOTAutograd flattened."""
    gm.graph.set_codegen(fx.graph.CodeGen())
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()


def _arrange_gradients(
    joint: fx.GraphModule, backward: fx.GraphModule, state: int
) -> tuple[list[int], list[int]]:
    """Orders backward's outputs: gradients of inputs, then of state.

    Gradients of inputs are made contiguous, to be sent as they are; those of state get
    memory of their own, because they are added to in place.
    """
    (joint_output,) = joint.graph.find_nodes(op="output")
    descs = [
        d
        for d in joint_output.meta["desc"]
        if d is None or isinstance(d, GradAOTOutput)
    ]
    (output,) = backward.graph.find_nodes(op="output")
    found: dict[int, fx.Node] = {}
    for desc, value in zip(descs, output.args[0], strict=True):
        if desc is not None and value is not None:
            found[_index(desc.grad_of)] = value
    results: list[fx.Node] = []
    owned: set[fx.Node] = set()
    inputs = sorted(i for i in found if i >= state)
    weights = sorted(i for i in found if i < state)
    clone = torch.ops.aten.clone.default
    with backward.graph.inserting_before(output):
        for i in [*inputs, *weights]:
            value = found[i]
            fake = value.meta["val"]
            root = base(value)
            shared = root.op == "placeholder" or root in owned
            if not fake.is_contiguous() or (i < state and shared):
                kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format}
                value = backward.graph.call_function(clone, (value,), kwargs)
                value.meta["val"] = fake.contiguous()
                root = value
            owned.add(root)
            results.append(value)
    output.args = (tuple(results),)
    _clear_pytree(backward)
    return weights, [i - state for i in inputs]


def _seed_random_numbers(graph: fx.Graph, numbers: Sequence[int]) -> bool:
    """Gives each random operation a seed of its own, from the job's seed.

    before: mask = native_dropout(x, 0.1, True)
    after:  mask = seeded(native_dropout, seed + 0, x, 0.1, True)

    numbers: of the model's draws, where this stage's are; they count from its first.
    """
    random = [n for n in graph.nodes if draws(n.target, n.args, n.kwargs)]
    if not random:
        return False
    if len(numbers) != len(random):  # AOTAutograd draws otherwise: numbers no one has
        numbers = [(i + 1) << 32 for i in range(len(random))]
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        seed = graph.placeholder("seed")
    for number, node in zip(numbers, random, strict=True):
        with graph.inserting_before(node):
            own = graph.call_function(operator.add, (seed, number))
            new = graph.call_function(
                ops.seeded, (node.target, own, *node.args), node.kwargs
            )
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return True
