"""Turns each stage into a forward call and a backward call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import fx

from ..autodiff.autograd import trace_stage, with_gradient_strides
from ..autodiff.joint_graph import Joint
from ..autodiff.split_backward import split_weights
from ..autodiff.stage_graphs import StageGraphs, cast_gradients, stage_key
from ..autodiff.stage_modules import (
    Place,
    backward_module,
    forward_module,
    weight_module,
)
from ..autodiff.temporaries import handed
from ..clock.stage_record import GroupBytes, Stage
from ..ir import joint, ops
from ..ir.facts import FACTS, facts, stage_facts
from ..ir.graphs import Role, Specs, arguments, in_type, result
from ..ir.lazy import write_code
from ..ir.meta import note_call, of_call
from ..ir.model_lines import LINES, model_lines
from ..ir.request import Request
from ..jobs.job import Direction, PlanError
from ..partition.costs import rates_of
from .gradient_layouts import GradientLayouts
from .gradient_order import other_layout
from .job_costs import JobCosts, most

SHORTEST = 1e-9  # seconds


def differentiate_stages(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """Gives every stage a forward and a backward call, backward in reverse order.

    before: stage_0 = self.stage_0((weights_0,), (x,)); a = stage_0[0]
    after:  forward_0 = self.forward_0((weights_0,), (x,), None)
            a = forward_0[0]; saved_0 = forward_0[1]
            ...
            backward_0 = self.backward_0((weights_0,), saved_0, (x,), (grad_a,), None)

    A backward call takes the weights again, so that no saved tensor is a weight or a
    view of one. A stage without a gradient to compute has no backward call. If the
    schedule splits the backward, it hands what weight_0 needs on in `carried_0`:

    after:  backward_0 = ...; carried_0 = backward_0[1]
            weight_0 = self.weight_0((), carried_0, None)

    The output becomes a dict: outputs, gradients of groups and inputs, new state.
    """
    return _Differentiation(gm, request).run()


class _Differentiation:
    def __init__(self, gm: fx.GraphModule, request: Request) -> None:
        self.gm, self.request, self.graph = gm, request, gm.graph
        self.calls = [n for n in gm.graph.nodes if n.op == "call_module"]
        self.facts = facts(gm)
        self.groups, self.stages = self.facts.groups, self.facts.stages.copy()
        self.output = gm.graph.output_node()
        self.gradients: dict[fx.Node, list[fx.Node]] = {}  # of a value, from readers
        self.sums: dict[int, list[fx.Node]] = {}  # of a group, from stages
        self.written: dict[int, fx.Node] = {}
        self.cache: dict[str, StageGraphs] = {}
        self.blocks: dict[str, Joint] = {}  # of stages, whose keys have ids in them
        self.pairs: dict[fx.Node, StageGraphs] = {}
        self.costs = JobCosts(request.device)
        self.layouts = GradientLayouts()
        self.parking: dict[str, float] = {}
        # with deterministic=True what stages give of a microbatch is added up first
        self.sum_dtype = None if request.deterministic else request.gradient_dtype

    def run(self) -> fx.GraphModule:
        loss = self._loss() if self.request.training else None
        self.deferred = loss is None
        outputs: Sequence[Any] = result(self.gm)
        with self.graph.inserting_before(self.output):
            for position, value in enumerate(outputs):
                wanted = self.facts.outputs[position].takes_gradient
                whole = self.facts.outputs[position].joint
                if not self.request.training or not wanted:
                    continue
                if loss is None:
                    tangent = self._tangent(position, value)
                elif position == loss:
                    tangent = self.graph.call_function(
                        ops.loss_gradient, (value, self._scale(whole))
                    )
                    tangent.meta.update(value.meta)
                else:
                    continue
                self.gradients.setdefault(value, []).append(tangent)
        self._trace_stages()
        for call in reversed(self.calls):
            self._stage(call)
        inputs = {
            str(of_call(node)["input"]): self.gradients[node]
            for node in self.graph.find_nodes(op="placeholder")
            if node in self.gradients and "input" in of_call(node)
        }
        self.output.args = (
            {
                "outputs": outputs,
                "groups": {str(g): nodes for g, nodes in sorted(self.sums.items())},
                "inputs": inputs,
                "state": {str(g): node for g, node in sorted(self.written.items())},
            },
        )
        self._describe_reads()
        self.graph.lint()
        self.gm.recompile()
        self.gm.meta[FACTS] = replace(
            self.facts,
            stages=self.stages,
            groups=self.groups,
            loss=loss,
            parking=self.parking,
        )
        return self.gm

    def _describe_reads(self) -> None:
        """Which weights the jobs of each stage read, and what these take."""
        for node in self.graph.find_nodes(op="call_module"):
            data = cast(Stage, self.stages.nodes[of_call(node)["stage"]])
            before = data.setdefault("reads", ())
            if weights := arguments(node)[0]:
                data["reads"] = (*before, of_call(node)["direction"])
                read = map(self._group_bytes, weights)
                data["groups"] = tuple(dict.fromkeys((*data.get("groups", ()), *read)))

    def _group_bytes(self, weights: fx.Node) -> GroupBytes:
        number, specs = of_call(weights)["group"], of_call(weights)["specs"]
        group = self.groups[number]
        pairs = list(zip(group.state, specs, strict=True))
        own = [spec.bytes for state, spec in pairs if state.role is not Role.SHARED]
        trained = tuple(s for s, t in zip(specs, group.trained, strict=True) if t)
        sums = in_type(trained, self.sum_dtype)
        sizes = (sum(spec.bytes for spec in each) for each in (trained, sums))
        return GroupBytes(number, sum(own), *sizes)

    def _trace_stages(self) -> None:
        """Traces stages from the last to the first, as gradients become known."""
        live = set(self.gradients)
        self.layouts.strides = dict.fromkeys(live)
        trained = [[False] * len(group.state) for group in self.groups]
        givers: list[set[int]] = [set() for _ in self.groups]
        for call in reversed(self.calls):
            weights, inputs = arguments(call)
            outs = _parts(call)
            module = self._module(call)
            module = with_gradient_strides(module, self.layouts.of(outs))
            pair = self._pair(module, tuple(value in live for value in outs))
            self.pairs[call] = pair
            if self.request.deterministic:
                lost = self.layouts.note(inputs, pair)
                if lost is not None:
                    raise self._other_layout(call, lost)
            for i in pair.input_gradients:
                live.update(joint.pointed(inputs[i]))
            for i in pair.state_gradients:
                group, k = stage_facts(module).places[i]
                number = of_call(weights[group])["group"]
                trained[number][k] = True
                givers[number].add(of_call(call)["stage"])
        self.groups = tuple(
            group._replace(trained=tuple(flags), givers=tuple(sorted(stages)))
            for group, flags, stages in zip(self.groups, trained, givers, strict=True)
        )

    def _other_layout(self, call: fx.Node, lost: int) -> PlanError:
        """The error for the gradient of an input of a stage."""
        value = joint.ends(arguments(call)[1][lost])[0]
        maker, position = cast(tuple[fx.Node, int], value.args)
        made: fx.Node = result(self._module(maker))[position]
        while made.all_input_nodes and not made.meta.get("stack_trace"):  # a copy
            made = made.all_input_nodes[0]
        module = self._module(call)
        given = module.graph.find_nodes(op="placeholder")
        read = given[len(stage_facts(module).places) + lost]
        what = f"stage {of_call(call)['stage']} gives the gradient of {value.name}"
        return other_layout(what, made, read.users)

    def _module(self, call: fx.Node) -> fx.GraphModule:
        module = self.gm.get_submodule(str(call.target))
        assert isinstance(module, fx.GraphModule)
        return module

    def _add(self, name: str, module: fx.GraphModule, stage: fx.Node) -> None:
        """Adds what a call of a stage becomes, with the user's lines."""
        module.meta[LINES] = model_lines(self._module(stage).graph)
        self.gm.add_submodule(name, module)

    def _loss(self) -> int | None:
        """The position of the one scalar output to differentiate, if there is one."""
        scalars, others = [], False
        pairs = zip(self.facts.outputs, result(self.gm), strict=True)
        for i, (output, value) in enumerate(pairs):
            if output.takes_gradient and of_call(value)["specs"][0].shape == ():
                others |= output.kind != "scalar"
                scalars += [i] * (output.kind == "scalar")
        return scalars[0] if len(scalars) == 1 and not others else None

    def _scale(self, whole: bool) -> float:
        """Of a loss, which may be of the whole batch."""
        if self.request.loss_reduction == "sum":
            return 1.0
        schedule = self.request.schedule
        if whole:
            return 1.0
        return self._replicas() / (schedule.update_every or schedule.microbatches)

    def _replicas(self) -> int:
        """Among how many workers an update's microbatches are dealt out; 1 where all
        have its gradients."""
        if self.request.schedule.average_every is None:
            return 1
        counts = {
            len(group.owners): group
            for group in self.facts.groups
            if any(group.trained)
        }
        if len(counts) > 1:
            few, many = (counts[count] for count in (min(counts), max(counts)))
            raise PlanError(
                f"average_every: workers {few.owners} keep {few.names[0]}, and workers "
                f"{many.owners} keep {many.names[0]}; let w keep each weight on the "
                "same number of workers"
            )
        return next(iter(counts), 1)

    def _tangent(self, position: int, value: fx.Node) -> fx.Node:
        with self.graph.inserting_before(self.calls[0]):
            tangent = self.graph.placeholder(f"tangent_{position}")
        note_call(tangent, tangent=position, specs=of_call(value)["specs"])
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
        stage = of_call(call)["stage"]
        outs = _parts(call)
        pair = self.pairs[call]
        # F again would see buffers that it has written meanwhile
        recompute = self.request.carries(stage) == "recompute" and not pair.mutated
        # or what the model has by the time of backward()
        numbers = [of_call(weights)["group"] for weights in arguments(call)[0]]
        written = any(self.groups[number].written for number in numbers)
        recompute = recompute and not (self.deferred and written)
        # nothing comes between F and B of a global-batch stage
        recompute = recompute and not self.stages.nodes[stage].get("joint")
        places = stage_facts(self._module(call)).places
        with self.graph.inserting_before(call):
            forward = self._forward(call, pair, places, len(outs))
        for value in outs:
            value.replace_input_with(call, forward)
        self.graph.erase_node(call)
        if pair.backward is None or not (pair.state_gradients or pair.input_gradients):
            return
        with self.graph.inserting_after(forward):
            saved = self._item(forward, len(outs), f"saved_{stage}")
        note_call(saved, specs=pair.saved, stage=stage, bundle=True, held=pair.held)
        if pair.saved:
            rates = rates_of(pair.saved[0].device, self.request.device)
            self.parking = {"disk": rates.disk, "host": rates.host}
        inputs = arguments(forward)[1]
        rows = [i for i, k in pair.views.items() if inputs[k].op == "placeholder"]
        note_call(saved, lent=tuple(rows))
        keep = None if recompute or not pair.saved else saved
        with self.graph.inserting_before(self.output):
            self._backward(call, forward, keep, pair, outs, recompute)
        if keep is None:
            self.graph.erase_node(saved)
            return
        for value, own in zip(outs, pair.own, strict=True):
            if not own:
                of_call(value)["held"] = 0

    def _backward(
        self,
        call: fx.Node,
        forward: fx.Node,
        saved: fx.Node | None,
        pair: StageGraphs,
        outs: list[fx.Node],
        recompute: bool,
    ) -> None:
        assert pair.backward is not None
        stage = of_call(call)["stage"]
        weights, inputs, _ = arguments(forward)
        places = stage_facts(self._module(call)).places
        trained = [self.groups[of_call(w)["group"]].trained for w in weights]
        used = {i for what, i in pair.needs if what == "input"}
        read_inputs = [
            x if recompute or i in used else None for i, x in enumerate(inputs)
        ]
        tangents = tuple(self._sum(outs[i]) for i in pair.tangents)
        zeros = _zeros(pair, places, trained)
        reads = recompute or _reads_state(pair.needs) or (zeros and pair.weight is None)
        module = backward_module(pair, places, recompute, trained, self.sum_dtype)
        self._add(f"backward_{stage}", module, call)
        given = handed(pair.forward, len(pair.saved))
        last, cost = pair.weight is None, self.costs
        moments = cost.moments(pair, recompute, module, given, last)
        backward = self.graph.call_module(
            f"backward_{stage}",
            (weights if reads else (), saved, tuple(read_inputs), tangents, None),
        )
        measured = stage_facts(self._module(call)).measured
        now, later, again = cost.backward(pair, measured)
        if recompute:
            seconds = of_call(forward)["seconds"]
            now, again = now + seconds, again + seconds
        size = max(pair.held if saved is not None else 0, pair.carried_bytes)
        kept = [x for x in read_inputs if x is not None and not joint.is_whole(x)]
        received = [value for value in kept if value.op != "placeholder"]
        held = size + sum(
            s.bytes for value in received for s in of_call(value)["specs"]
        )
        # 0 would say that it has no B, where it only gives a gradient another shape
        whole = max(now + later, SHORTEST)
        data = Stage(backward=whole, weight=later, again=again, held=held)
        forward_most = of_call(forward)["moments"]
        data["temporary"] = max(0, most(forward_most) - held, most(moments))
        self.stages.nodes[stage].update(data)
        note_call(
            backward,
            stage=stage,
            direction=Direction.BACKWARD,
            seconds=now,
            moments=moments,
            draw=of_call(forward)["draw"] if recompute else None,
        )
        self._hand_on(backward, pair, inputs)
        maker, first = backward, len(pair.input_gradients)
        if pair.weight is not None:
            reads = _reads_state(pair.weight_needs) or zeros
            read_weights = weights if reads else ()
            module = weight_module(pair, places, trained, self.sum_dtype)
            self._add(f"weight_{stage}", module, call)
            maker = self._weight(backward, pair, read_weights)
            first = 0
            given = handed(pair.backward, len(pair.carried))
            moments = cost.moments(pair, Direction.WEIGHT, module, given, True)
            note_call(maker, seconds=later, moments=moments)
        self._add_up(maker, first, pair, places, weights)

    def _weight(
        self, backward: fx.Node, pair: StageGraphs, weights: Sequence[Any]
    ) -> fx.Node:
        """The call that makes the weights' gradients of what B carries to it."""
        stage = of_call(backward)["stage"]
        carried = self._item(backward, len(pair.input_gradients), f"carried_{stage}")
        note_call(carried, specs=pair.carried, stage=stage, bundle=True)
        of_call(carried)["held"] = pair.carried_bytes
        call = self.graph.call_module(f"weight_{stage}", (weights, carried, None))
        note_call(call, stage=stage, direction=Direction.WEIGHT, draw=None)
        return call

    def _forward(
        self, call: fx.Node, pair: StageGraphs, places: list[Place], outs: int
    ) -> fx.Node:
        stage = of_call(call)["stage"]
        weights = arguments(call)[0]
        module = forward_module(pair, places, outs)
        self._add(f"forward_{stage}", module, call)
        forward = self.graph.call_module(f"forward_{stage}", (*call.args, None))
        note_call(forward, direction=Direction.FORWARD)
        measured = stage_facts(self._module(call)).measured
        seconds = self.costs.forward(pair, measured)
        moments = self.costs.moments(pair, Direction.FORWARD, module)
        note_call(forward, stage=stage, seconds=seconds, moments=moments)
        of_call(forward)["draw"] = of_call(call)["draw"] if pair.random else None
        data = Stage(forward=seconds, backward=0.0, weight=0.0, again=0.0, held=0)
        data["temporary"] = most(moments)
        self.stages.nodes[stage].update(data)
        written = sorted({places[i][0] for i in pair.mutated})
        with self.graph.inserting_after(forward):
            for position, j in enumerate(written):
                number = of_call(weights[j])["group"]
                new = self._item(forward, outs + 1 + position, f"state_{number}")
                new.meta.update(weights[j].meta, stage=stage)
                self.written[number] = new
        return forward

    def _item(self, call: fx.Node, position: int, name: str) -> fx.Node:
        args = (call, position)
        return self.graph.create_node(
            "call_function", operator.getitem, args, name=name
        )

    def _hand_on(
        self, backward: fx.Node, pair: StageGraphs, inputs: Sequence[Any]
    ) -> None:
        """Passes gradients to the makers of the inputs."""
        parts: dict[fx.Node, list[fx.Node]] = {}
        for position, i in enumerate(pair.input_gradients):
            gradient = self._item(backward, position, f"grad_{inputs[i].name}")
            gradient.meta.update(inputs[i].meta, stage=of_call(backward)["stage"])
            if inputs[i].target is joint.of:
                parts.setdefault(inputs[i].args[0], []).append(gradient)
            elif joint.is_whole(inputs[i]):
                total = self._pointer(joint.total, (gradient,))
                self.gradients.setdefault(inputs[i].args[0], []).append(total)
            elif inputs[i].target is joint.each:
                for b, value in enumerate(inputs[i].args):
                    part = self._pointer(joint.of, (gradient, b))
                    self.gradients.setdefault(value, []).append(part)
            else:
                self.gradients.setdefault(inputs[i], []).append(gradient)
        for value, gradients in parts.items():
            each = self._pointer(joint.each, tuple(gradients))
            self.gradients.setdefault(value, []).append(each)

    def _pointer(self, target: Any, args: tuple[Any, ...]) -> fx.Node:
        new = self.graph.call_function(target, args)
        new.meta.update(args[0].meta)
        return new

    def _add_up(
        self,
        call: fx.Node,
        first: int,
        pair: StageGraphs,
        places: list[Place],
        weights: Sequence[Any],
    ) -> None:
        """Passes gradients to the groups of weights; they are a call's results from
        the `first` on."""
        groups = sorted({places[i][0] for i in pair.state_gradients})
        for position, j in enumerate(groups, first):
            number = of_call(weights[j])["group"]
            gradient = self._item(call, position, f"grad_weights_{number}")
            trained = self.groups[number].trained
            specs = of_call(weights[j])["specs"]
            self._check_type(number, specs)
            specs = tuple(s for s, t in zip(specs, trained, strict=True) if t)
            note_call(
                gradient,
                specs=in_type(specs, self.sum_dtype),
                stage=of_call(call)["stage"],
                group=number,
                bundle=True,
            )
            self.sums.setdefault(number, []).append(gradient)

    def _check_type(self, number: int, specs: Specs) -> None:
        """Raises PlanError for gradients that have no real sum."""
        dtype, group = self.request.gradient_dtype, self.groups[number]
        for state, trained, spec in zip(group.state, group.trained, specs, strict=True):
            if trained and dtype is not None and spec.dtype.is_complex:
                raise PlanError(
                    f"backend(gradient_dtype={dtype}): {state.name} is {spec.dtype}, "
                    "whose gradients would lose their imaginary part; leave "
                    "gradient_dtype out, or keep the parameter as two real ones"
                )

    def _pair(self, module: fx.GraphModule, live: tuple[bool, ...]) -> StageGraphs:
        """The graphs of a stage; identical stages are traced once."""
        key = f"{live} {stage_key(module)}"
        if key not in self.cache:
            pair = trace_stage(
                module,
                live,
                len(stage_facts(module).places),
                self.facts.fake_mode,
                self.blocks,
            )
            if self.request.schedule.split_backward:
                pair = split_weights(pair)
            cast_gradients(pair, self.sum_dtype)
            for flat in (pair.forward, pair.backward, pair.weight):
                if flat is not None:
                    write_code(flat)
            self.cache[key] = pair
        return self.cache[key]


def _parts(call: fx.Node) -> list[fx.Node]:
    """The nodes that take a call's result apart, in the order of its outputs."""
    return sorted(call.users, key=lambda part: arguments(part)[1])


def _reads_state(needs: Sequence[tuple[str, int]]) -> bool:
    return any(what == "state" for what, _ in needs)


def _zeros(
    pair: StageGraphs, places: list[Place], trained: list[tuple[bool, ...]]
) -> bool:
    """Whether what makes gradients of groups puts zeros for some of their tensors."""
    groups = {places[i][0] for i in pair.state_gradients}
    return any(
        group in groups and trained[group][k] and i not in pair.state_gradients
        for i, (group, k) in enumerate(places)
    )
