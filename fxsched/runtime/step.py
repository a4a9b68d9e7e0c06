"""One call of the compiled function: inputs in, programs run, results to autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..clock.timeline import Event
from ..ir import ops
from ..ir.loss_scale import Scale, hand_over, infinite
from ..plans.plan import Plan
from ..rows.early_values import Early
from ..rows.row_warnings import RowWatch
from ..state.updates import StageOptimizers
from .input_agreement import Agreement
from .ranks import Ranks
from .run import Run
from .runnable import Runnable
from .threads import Threads


class BeforeCall(NamedTuple):
    """What is done with the inputs of each call of one plan before it runs.

    agreement: of ranks on their inputs. watch: warns of losses and outputs.
    early: computes inputs that follow the call's.
    """

    agreement: Agreement | None
    watch: RowWatch | None
    early: Early | None


class Step:
    """A planned step, to call with the inputs of the traced graph.

    scale: gives what B starts from.
    optimizers: step the weights, if the plan has updates.
    events: of the last call, from its start on, if `record`; where B runs in
        backward(), as if that followed at once.
    latest: the runs of that call.
    """

    def __init__(
        self,
        plan: Plan,
        programs: dict[int, Runnable],
        workers: Threads | Ranks,
        before: BeforeCall,
        scale: Scale | None,
        optimizers: StageOptimizers | None,
        record: bool,
    ) -> None:
        self.plan, self.programs, self.workers = plan, programs, workers
        self.before, self.scale, self.record = before, scale, record
        self.optimizers = optimizers
        self.events: tuple[Event, ...] = ()
        self.latest: list[Run] = []
        self.apart: bool | None = None  # whether ranks draw other numbers than rank 0
        self.factor: float | None = None  # what it gave in the last call

    def __call__(self, args: tuple[Any, ...], said: set[str]) -> Sequence[Any]:
        """Runs the programs on `args`, which get the gradients.

        said: what was warned of; what this call warns of is added.
        """
        inputs = self._inputs(args, said)
        if not self.plan.trains:
            results = self._advance(self._start(inputs), None)
            return self._outputs(inputs, results)
        leaves = [
            i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad
        ]
        tensors = [args[i] for i in leaves]
        apply: Any = self._function.apply
        outputs: tuple[Any, ...] = apply(self, inputs, leaves, *tensors)
        return outputs

    @property
    def _function(self) -> type[torch.autograd.Function]:
        """Which of the three below a call is."""
        if self.optimizers is not None:
            return _Updating
        return _InBackward if self.plan.loss is None else _InCall

    def _inputs(self, args: tuple[Any, ...], said: set[str]) -> tuple[Any, ...]:
        """What to run on: the arguments on which ranks agree, and what is computed for
        the whole batch beforehand."""
        agreement, watch, early = self.before
        inputs = args if agreement is None else agreement(args)
        with self.workers.guarded():
            if watch is not None:
                watch(inputs, said)
            return inputs if early is None else (*inputs, *early(*inputs))

    def forget(self) -> None:
        """What is asked at the first calls is asked anew: after an error, some ranks
        may have drawn more numbers than others."""
        self.apart = None
        if self.before.agreement is not None:
            self.before.agreement.calls = 0

    def _draw(self) -> int:
        """The number that the random numbers of this call come of, from torch's
        generator; rank 0's, where those of the ranks differ. 0 if there are none.

        Whether they do is asked at the first call. A job that draws in F on one rank
        and again in B on another must not depend on what ranks draw later on.
        """
        if not self.plan.draws:
            return 0
        number = ops.draw_base()
        if self.apart is None:
            self.apart = self.workers.differ(number) or self.plan.redraws
        return self.workers.first(number) if self.apart else number

    def _start(self, args: tuple[Any, ...]) -> list[Run]:
        random = self._draw()
        self.factor = None if self.scale is None else self.scale()
        optimizers = None if self.optimizers is None else self.optimizers.begin(args)

        def inputs(program: fx.GraphModule) -> dict[str, Any]:
            values: dict[str, Any] = {}
            for node in program.graph.find_nodes(op="placeholder"):
                if "group" in node.meta:
                    group = self.plan.groups[node.meta["group"]]
                    values[node.name] = tuple(
                        Tensor.detach(args[each.input]) for each in group.state
                    )
                elif "input" in node.meta:
                    values[node.name] = args[node.meta["input"]].detach()
                elif node.name == "optimizer":
                    values[node.name] = optimizers
                elif node.name == "loss_scale":
                    values[node.name] = self.factor
                else:
                    values[node.name] = random
            return values

        self.events = ()
        self.latest = self.workers.start(self.programs, inputs)
        return self.latest

    def _advance(
        self, runs: list[Run], tangents: dict[int, Tensor] | None
    ) -> dict[str, Any]:
        """The results of the workers here, as one."""
        merged: dict[str, Any]
        merged = {"outputs": (), "state": {}, "groups": {}, "inputs": {}}
        begin = self.workers.together() if self.record else 0.0
        advanced = self.workers.advance(runs, tangents)
        if self.record:
            self._record(runs, begin)
        for results in advanced:
            for key, value in results.items():
                if isinstance(value, dict):
                    merged[key] = value | merged[key]
                else:
                    merged[key] = merged[key] or value
        return merged

    def _record(self, runs: list[Run], begin: float) -> None:
        """Adds what ran since `begin` to the events, on one clock for all workers."""
        shift = max((event.end for event in self.events), default=0.0) - begin
        new = [
            event._replace(start=event.start + shift, end=event.end + shift)
            for run in runs
            for event in run.events
        ]
        for run in runs:
            run.events.clear()
        new = sorted(self.workers.gather(new), key=lambda e: (e.start, e.worker))
        if runs is self.latest:  # a call before it may run its backward() now
            self.events += tuple(new)

    def _outputs(
        self, args: tuple[Any, ...], results: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Writes new buffers to the model; gives the outputs."""
        outputs = list(results["outputs"])
        returned = {output.state: output for output in self.plan.outputs}
        with torch.no_grad():
            for group, values in results["state"].items():
                state = self.plan.groups[int(group)].state
                for each, value in zip(state, values, strict=True):
                    if each.input not in returned:
                        args[each.input].copy_(value)
            for position, output in enumerate(self.plan.outputs):
                if isinstance(output.constant, Tensor):
                    outputs[position] = output.constant.clone()
                if output.kind == "given" and output.state is not None:
                    outputs[position] = args[output.state].clone()
                elif output.state is not None and not output.replaced:
                    tensor = args[output.state]
                    outputs[position] = Tensor.copy_(tensor, outputs[position])
        return tuple(outputs)

    def _gradients(
        self, results: dict[str, Any], leaves: Sequence[int]
    ) -> list[Tensor | None]:
        """The gradient of each leaf; None for those that other workers keep."""
        gradient_of: dict[int, Tensor] = {
            int(i): g for i, g in results["inputs"].items()
        }
        for group, gradients in results["groups"].items():
            weights = self.plan.groups[int(group)]
            state, trained = weights.state, weights.trained
            wanted = [s.input for s, t in zip(state, trained, strict=True) if t]
            gradient_of.update(zip(wanted, gradients, strict=True))
        return [gradient_of.get(i) for i in leaves]


def _mark(ctx: Any, step: Step, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Outputs that got no gradient in the traced model get none here."""
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(
        *(
            value
            for value, output in zip(outputs, step.plan.outputs, strict=True)
            if isinstance(value, Tensor) and not output.differentiable
        )
    )
    return outputs


def _first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward() that refuses to be differentiated, instead of giving a gradient
    that loses the second one in silence."""

    @wraps(backward)
    def guarded(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fxsched: create_graph=True asks for a gradient that can be "
                "differentiated again, and the B of a plan gives none; for a gradient "
                "penalty or a Hessian, call the model itself, not what torch.compile "
                "made of it, and add what that gives to .grad"
            )
        with torch.no_grad():
            return backward(ctx, *gradients)

    return guarded


class _InCall(torch.autograd.Function):
    """F and B in the call; backward() hands over the finished gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        step: Step,
        args: tuple[Any, ...],
        leaves: list[int],
        *tensors: Tensor,
    ) -> tuple[Any, ...]:
        results = step._advance(step._start(args), None)
        ctx.loss, ctx.gradients = step.plan.loss, step._gradients(results, leaves)
        ctx.names = [output.name for output in step.plan.outputs]
        ctx.step, ctx.factor = step, step.factor
        return _mark(ctx, step, step._outputs(args, results))

    @staticmethod
    @_first_order
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        for position, gradient in enumerate(tangents):
            if gradient is not None and position != ctx.loss:
                raise RuntimeError(
                    f"fxsched: output {ctx.names[position]!r} got a gradient, but B "
                    f"already ran in the call, from output {ctx.names[ctx.loss]!r}, "
                    "the loss; compute all of the loss in the model, or return no "
                    "scalar: then B runs in backward()"
                )
        gradients, ctx.gradients = ctx.gradients, None
        _once(gradients)
        incoming = tangents[ctx.loss]
        if incoming is None:
            return (None,) * (3 + len(gradients))
        half = ctx.step.plan.half
        gradients = hand_over(gradients, incoming, ctx.factor, half)
        if ctx.factor is not None and ctx.step.workers.skips(gradients):
            gradients = infinite(gradients)
        return (None, None, None, *gradients)


class _Updating(torch.autograd.Function):
    """F, B and U in the call; there is nothing left for backward()."""

    @staticmethod
    def forward(
        ctx: Any,
        step: Step,
        args: tuple[Any, ...],
        leaves: list[int],
        *tensors: Tensor,
    ) -> tuple[Any, ...]:
        assert step.optimizers is not None, "a plan with updates has an optimizer"
        try:
            results = step._advance(step._start(args), None)
        finally:
            step.optimizers.end()
        return _mark(ctx, step, step._outputs(args, results))

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        raise RuntimeError(
            "fxsched: backend(optimizer=) has updated the weights in the call; leave "
            "out backward() and optimizer.step()"
        )


class _InBackward(torch.autograd.Function):
    """F in the call, B in backward()."""

    @staticmethod
    def forward(
        ctx: Any,
        step: Step,
        args: tuple[Any, ...],
        leaves: list[int],
        *tensors: Tensor,
    ) -> tuple[Any, ...]:
        ctx.step, ctx.runs, ctx.leaves = step, step._start(args), leaves
        ctx.versions = [(tensor, tensor._version) for tensor in tensors]
        outputs = step._outputs(args, step._advance(ctx.runs, None))
        ctx.like = {
            i: (value.shape, value.dtype, value.device)
            for i, (value, output) in enumerate(
                zip(outputs, step.plan.outputs, strict=True)
            )
            if output.takes_gradient
        }
        return _mark(ctx, step, outputs)

    @staticmethod
    @_first_order
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        runs, ctx.runs = ctx.runs, None
        _once(runs)
        if any(tensor._version != version for tensor, version in ctx.versions):
            raise RuntimeError(
                "fxsched: a parameter or input was changed in place between the call "
                "and its backward(); call optimizer.step() after backward()"
            )
        for gradient, output in zip(incoming, ctx.step.plan.outputs, strict=True):
            if gradient is not None and not output.takes_gradient:
                raise RuntimeError(
                    f"fxsched: output {output.name!r} got a gradient, but it is the "
                    f"{output.how} of the microbatches, and none of them is known as "
                    "the one that it came from; detach() it, or compute it outside of "
                    "the model from an output with one row for each sample"
                )
        tangents = {}
        for i, (shape, dtype, device) in ctx.like.items():
            gradient = incoming[i]
            if gradient is None:
                gradient = torch.zeros(shape, dtype=dtype, device=device)
            tangents[i] = gradient.contiguous()
        results = ctx.step._advance(runs, tangents)
        return (None, None, None, *ctx.step._gradients(results, ctx.leaves))


def _once(value: object) -> None:
    if value is None:
        raise RuntimeError(
            "fxsched: backward() a second time through one step; call the model again"
        )
