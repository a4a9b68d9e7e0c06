"""Turns each stage into a forward graph and a backward graph.

The only file that knows AOTAutograd.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
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
from torch.utils.flop_counter import flop_registry

from .. import ops
from ..graphs import Group, Spec, base
from ..request import Request

Place = tuple[int, int]  # group of a stage, and tensor in the group


class Pair(NamedTuple):
    """A stage's forward and backward graph, on flat lists of tensors.

    forward: (state..., inputs...) -> (outputs..., new state..., saved...)
    backward: what `needs` lists -> (gradients of state, of inputs), None left out
    needs: for each argument of backward, what it is and which: ("state", 3),
        ("input", 0), ("saved", 2) or ("tangent", 0).
    mutated: indices of state that forward writes.
    gradients: indices of the state, then of the inputs, that backward gives.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    needs: tuple[tuple[str, int], ...]
    mutated: tuple[int, ...]
    saved: tuple[Spec, ...]
    state_gradients: tuple[int, ...]
    input_gradients: tuple[int, ...]
    tangents: tuple[int, ...]  # outputs whose gradients backward is given
    random: bool


def differentiate_stages(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """Gives every stage a forward and a backward call, backward in reverse order.

    before: stage_0 = self.stage_0((weights_0,), (x,)); a = stage_0[0]
    after:  forward_0 = self.forward_0((weights_0,), (x,), None)
            a = forward_0[0]; saved_0 = forward_0[1]
            ...
            backward_0 = self.backward_0((weights_0,), saved_0, (x,), (grad_a,), None)

    A backward call takes the weights again, so that no saved tensor is a weight or a
    view of one. A stage without a gradient to compute has no backward call.
    The output becomes a dict: outputs, gradients of groups and inputs, new state.
    """
    return _Differentiation(gm, request).run()


class _Differentiation:
    def __init__(self, gm: fx.GraphModule, request: Request) -> None:
        self.gm, self.request, self.graph = gm, request, gm.graph
        self.calls = [n for n in gm.graph.nodes if n.op == "call_module"]
        self.groups: list[Group] = gm.meta["groups"]
        (self.output,) = (n for n in gm.graph.nodes if n.op == "output")
        self.gradients: dict[fx.Node, list[fx.Node]] = {}  # of a value, from readers
        self.sums: dict[int, list[fx.Node]] = {}  # of a group, from stages
        self.written: dict[int, fx.Node] = {}
        self.cache: dict[str, Pair] = {}
        self.pairs: dict[fx.Node, Pair] = {}

    def run(self) -> fx.GraphModule:
        loss = self.gm.meta["loss"] = self._loss() if self.request.training else None
        outputs: Sequence[Any] = self.output.args[0]  # type: ignore[assignment]
        with self.graph.inserting_before(self.output):
            for position, value in enumerate(outputs):
                if not self.request.training or not _differentiable(value):
                    continue
                if loss is None:
                    tangent = self._tangent(position, value)
                elif position == loss:
                    tangent = self.graph.call_function(
                        ops.loss_gradient, (value, self._scale())
                    )
                    tangent.meta.update(value.meta)
                else:
                    continue
                self.gradients.setdefault(value, []).append(tangent)
        self._trace_stages()
        for call in reversed(self.calls):
            self._stage(call)
        inputs = {
            str(node.meta["input"]): self.gradients[node]
            for node in self.graph.find_nodes(op="placeholder")
            if node in self.gradients and "input" in node.meta
        }
        self.output.args = (
            {
                "outputs": outputs,
                "groups": {str(g): nodes for g, nodes in sorted(self.sums.items())},
                "inputs": inputs,
                "state": {str(g): node for g, node in sorted(self.written.items())},
            },
        )
        self.graph.lint()
        self.gm.recompile()
        return self.gm

    def _trace_stages(self) -> None:
        """Traces stages from the last to the first, as gradients become known."""
        live = set(self.gradients)
        trained = [[False] * len(group.names) for group in self.groups]
        for call in reversed(self.calls):
            weights, inputs = call.args
            outs = sorted(call.users, key=lambda n: n.args[1])
            module = self._module(call)
            pair = self._pair(module, tuple(value in live for value in outs))
            self.pairs[call] = pair
            live.update(inputs[i] for i in pair.input_gradients)  # type: ignore
            for i in pair.state_gradients:
                group, k = module.meta["state"][i]
                trained[weights[group].meta["group"]][k] = True  # type: ignore
        self.groups = self.gm.meta["groups"] = [
            group._replace(trained=tuple(flags))
            for group, flags in zip(self.groups, trained, strict=True)
        ]

    def _module(self, call: fx.Node) -> fx.GraphModule:
        module = self.gm.get_submodule(str(call.target))
        assert isinstance(module, fx.GraphModule)
        return module

    def _loss(self) -> int | None:
        """The position of the one scalar output to differentiate, if there is one."""
        values: Sequence[Any] = self.output.args[0]  # type: ignore[assignment]
        kinds = [output.kind for output in self.gm.meta["outputs"]]
        scalars = [
            i
            for i, value in enumerate(values)
            if kinds[i] == "scalar" and _differentiable(value)
        ]
        return scalars[0] if len(scalars) == 1 else None

    def _scale(self) -> float:
        if self.request.loss_reduction == "sum":
            return 1.0
        return 1.0 / self.request.schedule.microbatches

    def _tangent(self, position: int, value: fx.Node) -> fx.Node:
        with self.graph.inserting_before(self.calls[0]):
            tangent = self.graph.placeholder(f"tangent_{position}")
        tangent.meta.update(tangent=position, specs=value.meta["specs"])
        return tangent

    def _sum(self, value: fx.Node) -> fx.Node:
        """The gradient of a value: the sum over its readers, the last reader first."""
        parts = self.gradients[value]
        if len(parts) == 1:
            return parts[0]
        total = self.graph.call_function(ops.add, tuple(parts))
        total.meta.update(parts[0].meta)
        return total

    def _stage(self, call: fx.Node) -> None:
        stage = call.meta["stage"]
        weights, inputs = call.args
        assert isinstance(weights, tuple) and isinstance(inputs, tuple)
        outs = sorted(call.users, key=lambda n: n.args[1])
        pair = self.pairs[call]
        recompute = self.request.carry == "recompute"
        places: list[Place] = self._module(call).meta["state"]
        with self.graph.inserting_before(call):
            forward = self._forward(call, pair, places, len(outs))
        for value in outs:
            value.replace_input_with(call, forward)
        self.graph.erase_node(call)
        if pair.backward is None or not (pair.state_gradients or pair.input_gradients):
            return
        with self.graph.inserting_after(forward):
            saved = self._item(forward, len(outs), f"saved_{stage}")
        saved.meta.update(specs=pair.saved, stage=stage, bundle=True)
        used = {i for what, i in pair.needs if what == "input"}
        given = [
            x if recompute or i in used else None for i, x in enumerate(inputs)
        ]
        keep = None if recompute or not pair.saved else saved
        with self.graph.inserting_before(self.output):
            tangents = tuple(self._sum(outs[i]) for i in pair.tangents)
            trained = [self.groups[w.meta["group"]].trained for w in weights]
            self.gm.add_submodule(
                f"backward_{stage}", _backward_module(pair, places, recompute, trained)
            )
            backward = self.graph.call_module(
                f"backward_{stage}",
                (weights if recompute or _needs_state(pair, places, trained) else (), keep,
                 tuple(given), tangents, None),
            )
            backward.meta.update(
                stage=stage,
                flops=_flops(pair.backward) + recompute * forward.meta["flops"],
                random=pair.random and recompute,
            )
            self._hand_on(backward, pair, places, weights, inputs)
        if keep is None:
            self.graph.erase_node(saved)

    def _forward(
        self, call: fx.Node, pair: Pair, places: list[Place], outs: int
    ) -> fx.Node:
        stage = call.meta["stage"]
        weights = call.args[0]
        assert isinstance(weights, tuple)
        self.gm.add_submodule(f"forward_{stage}", _forward_module(pair, places, outs))
        forward = self.graph.call_module(f"forward_{stage}", (*call.args, None))
        forward.meta.update(stage=stage, flops=_flops(pair.forward), random=pair.random)
        written = sorted({places[i][0] for i in pair.mutated})
        with self.graph.inserting_after(forward):
            for position, j in enumerate(written):
                number = weights[j].meta["group"]  # type: ignore[union-attr]
                new = self._item(forward, outs + 1 + position, f"state_{number}")
                new.meta.update(weights[j].meta, stage=stage)  # type: ignore[union-attr]
                self.written[number] = new
        return forward

    def _item(self, call: fx.Node, position: int, name: str) -> fx.Node:
        args = (call, position)
        return self.graph.create_node("call_function", operator.getitem, args, name=name)

    def _hand_on(
        self,
        backward: fx.Node,
        pair: Pair,
        places: list[Place],
        weights: Sequence[Any],
        inputs: Sequence[Any],
    ) -> None:
        """Passes gradients to the makers of the inputs, and to the groups."""
        stage = backward.meta["stage"]
        for position, i in enumerate(pair.input_gradients):
            gradient = self._item(backward, position, f"grad_{inputs[i].name}")
            gradient.meta.update(inputs[i].meta, stage=stage)
            self.gradients.setdefault(inputs[i], []).append(gradient)
        for position, j in enumerate(sorted({places[i][0] for i in pair.state_gradients})):
            number = weights[j].meta["group"]
            k = len(pair.input_gradients) + position
            gradient = self._item(backward, k, f"grad_weights_{number}")
            trained = self.groups[number].trained
            specs = weights[j].meta["specs"]
            gradient.meta.update(
                specs=tuple(s for s, t in zip(specs, trained, strict=True) if t),
                stage=stage,
                group=number,
                bundle=True,
            )
            self.sums.setdefault(number, []).append(gradient)

    def _pair(self, module: fx.GraphModule, live: tuple[bool, ...]) -> Pair:
        """The graphs of a stage; identical stages are traced once."""
        key = f"{live} {_key(module)}"
        if key not in self.cache:
            self.cache[key] = _trace(
                module, live, len(module.meta["state"]), self.gm.meta["fake_mode"]
            )
        return self.cache[key]


def _differentiable(value: Any) -> bool:
    return isinstance(value, fx.Node) and bool(value.meta["val"].requires_grad)


def _needs_state(
    pair: Pair, places: list[Place], trained: list[tuple[bool, ...]]
) -> bool:
    """Whether B reads weights: for its graph, or for zeros in the place of gradients."""
    groups = {places[i][0] for i in pair.state_gradients}
    zeros = any(
        group in groups and trained[group][k] and i not in pair.state_gradients
        for i, (group, k) in enumerate(places)
    )
    return zeros or any(what == "state" for what, _ in pair.needs)


def _key(module: fx.GraphModule) -> str:
    """Text that is equal for stages that compute the same on the same shapes."""
    number = {node: f"%{i}" for i, node in enumerate(module.graph.nodes)}
    lines = []
    for node in module.graph.nodes:
        args = fx.map_arg((node.args, node.kwargs), lambda n: fx.Proxy(n))
        text = repr(fx.node.map_aggregate(args, lambda a: number[a.node]
                    if isinstance(a, fx.Proxy) else a))
        line = f"{node.op} {text}"
        if node.op == "placeholder":
            fake = node.meta["val"]
            line += f" {Spec.of(fake)!r} {fake.requires_grad}"
        else:
            line += f" {node.target} {id(node.target)}"
        if node.op == "get_attr":
            line += str(id(getattr(module, str(node.target), node)))
        lines.append(line)
    return "\n".join([*lines, str(module.meta["state"])])


def _trace(
    module: fx.GraphModule, live: tuple[bool, ...], state: int, mode: Any
) -> Pair:
    """Traces a stage through AOTAutograd and parts it into forward and backward."""
    flat = _without_dead_tangents(module, live)
    with mode:
        arguments = tuple(
            Spec.of(n.meta["val"]).empty().requires_grad_(
                n.meta["val"].requires_grad and any(live)
            )
            for n in flat.graph.find_nodes(op="placeholder")
        )
    grad = torch.enable_grad() if any(live) else torch.no_grad()
    with tracing(TracingContext(mode)), contextlib.ExitStack() as stack, grad:
        exported = aot_export_joint_with_descriptors(stack, flat, arguments)
        joint = exported.graph_module
        assert isinstance(joint, fx.GraphModule)
        (output,) = joint.graph.find_nodes(op="output")
        results = [
            d for d in output.meta["desc"] if not (d is None or isinstance(d, GradAOTOutput))
        ]
        if any(isinstance(d, GradAOTOutput) for d in output.meta["desc"]):
            _recompute_views_of_state(joint, state)
            forward, backward = default_partition(
                joint, (), num_fwd_outputs=len(results)
            )
        else:
            forward, backward = joint, None
    return _pair_of(joint, forward, backward, results, state, live)


def _without_dead_tangents(
    module: fx.GraphModule, live: tuple[bool, ...]
) -> fx.GraphModule:
    """The stage with outputs that get no gradient detached, so that none is computed."""
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


def _recompute_views_of_state(joint: fx.GraphModule, state: int) -> None:
    """Computes again in backward what depends on the state alone, such as w.t().

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
        elif node.op == "call_function" and _is_forward(node):
            read = node.all_input_nodes
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if read and not random and all(p in derived for p in read):
                derived[node] = None
    copies: dict[fx.Node, fx.Node] = {}

    def again(node: fx.Node, before: fx.Node) -> fx.Node:
        if node.op == "placeholder":
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
        if node.op == "call_function" and not _is_forward(node):
            for read in node.all_input_nodes:
                if read in derived:
                    node.replace_input_with(read, again(read, node))
    joint.recompile()


def _is_forward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_forward"


def _pair_of(
    joint: fx.GraphModule,
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    results: list[Any],
    state: int,
    live: tuple[bool, ...],
) -> Pair:
    """Sorts out what the parts take and give; weights and inputs are not saved."""
    names: dict[str, tuple[str, int]] = {}
    for node in joint.graph.find_nodes(op="placeholder"):
        desc = node.meta["desc"]
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
    plain = {d.idx: v for d, v in zip(results, flat, strict=False)
             if isinstance(d, PlainAOTOutput)}
    mutated = {
        d.mutated_input.idx: v
        for d, v in zip(results, flat, strict=False)
        if isinstance(d, InputMutationAOTOutput)
    }
    assert len(plain) + len(mutated) == len(results), f"unknown outputs in {results}"
    assert all(i < state for i in mutated), "a stage writes into a value that it reads"
    kept = {v.name: v for v in flat[len(results):]}
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
    random = _seed_random_numbers(forward.graph)
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
        tuple(state_gradients),
        tuple(input_gradients),
        tuple(i for i, wanted in enumerate(live) if wanted),
        random,
    )


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
    descs = [d for d in joint_output.meta["desc"] if d is None or isinstance(d, GradAOTOutput)]
    (output,) = backward.graph.find_nodes(op="output")
    found: dict[int, fx.Node] = {}
    for desc, value in zip(descs, output.args[0], strict=True):
        if desc is not None and value is not None:
            found[desc.grad_of.idx] = value
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
                kwargs = {"memory_format": torch.contiguous_format}
                value = backward.graph.call_function(clone, (value,), kwargs)
                value.meta["val"] = fake.contiguous()
                root = value
            owned.add(root)
            results.append(value)
    output.args = (tuple(results),)
    _clear_pytree(backward)
    return weights, [i - state for i in inputs]


def _seed_random_numbers(graph: fx.Graph) -> bool:
    """Gives each random operation a seed of its own, from the job's seed.

    before: mask = native_dropout(x, 0.1, True)
    after:  mask = seeded(native_dropout, seed + 0, x, 0.1, True)
    """
    random = [
        n
        for n in graph.nodes
        if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
    ]
    if not random:
        return False
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        seed = graph.placeholder("seed")
    for number, node in enumerate(random):
        with graph.inserting_before(node):
            own = graph.call_function(operator.add, (seed, number))
            new = graph.call_function(
                ops.seeded, (node.target, own, *node.args), node.kwargs
            )
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return True


def _flops(gm: fx.GraphModule) -> int:
    """FLOPs of an aten graph, by torch.utils.flop_counter's formulas."""
    count = 0
    for node in gm.graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if packet in flop_registry:
            def value(n: fx.Node) -> Any:
                return n.meta.get("val")

            args = fx.map_arg(node.args, value)
            kwargs = fx.map_arg(node.kwargs, value)
            count += int(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    return count


def _forward_module(pair: Pair, places: list[Place], outs: int) -> fx.GraphModule:
    """Calls the flat forward graph with bundles: (weights, inputs, seed) -> outputs,
    saved, and a bundle for each group with new state."""
    call = _Wrapper(pair, places)
    flat = call.forward()
    results: list[Any] = [call.item(flat, i) for i in range(outs)]
    new = {i: call.item(flat, outs + k) for k, i in enumerate(pair.mutated)}
    first = outs + len(pair.mutated)
    results.append(tuple(call.item(flat, first + k) for k in range(len(pair.saved))))
    for group in sorted({places[i][0] for i in pair.mutated}):
        members = sorted((k, i) for i, (g, k) in enumerate(places) if g == group)
        results.append(tuple(new.get(i) or call.state(i) for _, i in members))
    return call.finish(results)


def _backward_module(
    pair: Pair, places: list[Place], recompute: bool, trained: list[tuple[bool, ...]]
) -> fx.GraphModule:
    """Calls the flat backward graph with bundles: (weights, saved, inputs, tangents,
    seed) -> gradients of inputs, and a bundle of gradients for each group."""
    call = _Wrapper(pair, places, backward=True)
    saved: Callable[[int], fx.Node]
    if recompute:
        flat = call.forward()
        outs = len(_results(pair.forward)) - len(pair.saved)

        def saved(k: int) -> fx.Node:
            return call.item(flat, outs + k)
    else:
        def saved(k: int) -> fx.Node:
            return call.item(call.saved, k)
    arguments = []
    for what, i in pair.needs:
        if what == "state":
            arguments.append(call.state(i))
        elif what == "input":
            arguments.append(call.item(call.inputs, i))
        elif what == "saved":
            arguments.append(saved(i))
        else:
            arguments.append(call.item(call.tangents, pair.tangents.index(i)))
    call.root["flat_backward"] = pair.backward
    result = call.graph.call_module("flat_backward", tuple(arguments))
    count = len(pair.input_gradients)
    results: list[Any] = [call.item(result, i) for i in range(count)]
    given = {i: call.item(result, count + k) for k, i in enumerate(pair.state_gradients)}
    for group in sorted({places[i][0] for i in given}):
        members = sorted((k, i) for i, (g, k) in enumerate(places) if g == group)
        results.append(
            tuple(
                given.get(i) or call.graph.call_function(torch.zeros_like, (call.state(i),))
                for k, i in members
                if trained[group][k]
            )
        )
    return call.finish(results)


def _results(gm: fx.GraphModule) -> tuple[Any, ...]:
    (output,) = gm.graph.find_nodes(op="output")
    return tuple(output.args[0])


class _Wrapper:
    """Builds the graph that unpacks bundles for a flat graph."""

    def __init__(self, pair: Pair, places: list[Place], backward: bool = False) -> None:
        self.pair, self.places, self.graph = pair, places, fx.Graph()
        self.root: dict[str, Any] = {}
        self.weights = self.graph.placeholder("weights")
        if backward:
            self.saved = self.graph.placeholder("saved")
        self.inputs = self.graph.placeholder("inputs")
        if backward:
            self.tangents = self.graph.placeholder("tangents")
        self.seed = self.graph.placeholder("seed")
        self.items: dict[tuple[fx.Node, int], fx.Node] = {}

    def item(self, value: fx.Node, index: int) -> fx.Node:
        if (value, index) not in self.items:
            found = self.graph.call_function(operator.getitem, (value, index))
            self.items[value, index] = found
        return self.items[value, index]

    def state(self, i: int) -> fx.Node:
        group, k = self.places[i]
        return self.item(self.item(self.weights, group), k)

    def forward(self) -> fx.Node:
        self.root["flat_forward"] = self.pair.forward
        count = len(self.pair.forward.graph.find_nodes(op="placeholder"))
        inputs = count - self.pair.random - len(self.places)
        arguments = [self.seed] * self.pair.random
        arguments += [self.state(i) for i in range(len(self.places))]
        arguments += [self.item(self.inputs, i) for i in range(inputs)]
        return self.graph.call_module("flat_forward", tuple(arguments))

    def finish(self, results: list[Any]) -> fx.GraphModule:
        self.graph.output(tuple(results))
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph, "Stage")
