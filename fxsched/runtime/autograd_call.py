"""A call of the compiled function as autograd sees it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ir.graphs import Output
from ..ir.loss_scale import hand_over, infinite
from ..jobs.job import PlanError
from ..params.rank_gradients import mark_gradients
from ..params.record import record_of
from ..params.released import has_hooks
from .cut_weights import cut_weights
from .step import Step

UNREAD = 16  # calls whose gradients nobody took, after which a warning says so
FORGOTTEN = (
    f"fxsched: {UNREAD} calls of the model without a backward(): B has run in each of "
    "them, for gradients that nobody took; call loss.backward(), or evaluate under "
    "torch.no_grad(), which runs F alone"
)


class Leaves(NamedTuple):
    """What of a call's inputs gets a gradient on this rank.

    inputs: by their positions. marked: the parameters, by name, where other ranks have
        gradients of other parameters.
    """

    inputs: list[int]
    marked: Mapping[str, Tensor]


def call_step(step: Step, args: tuple[Any, ...], said: set[str]) -> Sequence[Any]:
    """Runs a step on the inputs of the traced graph, which get the gradients.

    said: what was warned of; what this call warns of is added.
    """
    inputs, parts = step.inputs(args, said), cut_weights(args, step.plan.parts)
    inputs = (*inputs, *parts.values())
    if not step.plan.trains:
        return step.outputs(inputs, step.advance(step.start(inputs), None))
    cut = {part.input for part in step.plan.parts.values()}
    given = {i: a for i, a in enumerate(args) if i not in cut} | parts
    trained = [i for i, a in given.items() if isinstance(a, Tensor) and a.requires_grad]
    here = [i for i in trained if _has_gradient(step, given[i])]
    marked = step.parameters(args) if _differ(step, map(given.get, trained)) else {}
    if step.optimizers is not None:
        _refuse_hooks(step.parameters(args))
    tensors = [given[i] for i in here]
    if not here:  # autograd needs something to come to
        here, tensors = [-1], [torch.empty(0, requires_grad=bool(trained))]
    apply: Any = _function(step).apply
    outputs: tuple[Any, ...] = apply(step, inputs, Leaves(here, marked), *tensors)
    return outputs


def _has_gradient(step: Step, tensor: Tensor) -> bool:
    """Whether a worker of this process gets a tensor's gradient. Hooks on the tensor
    run there, and not where autograd would hand them None."""
    record = record_of(tensor)
    return any(record.is_updated(worker) for worker in step.workers.here)


def _differ(step: Step, tensors: Iterable[Any]) -> bool:
    """Whether ranks get gradients of different parameters."""
    ranks = len(step.workers.here) < step.plan.schedule.workers
    records = map(record_of, tensors)
    return ranks and not all(each.is_updated_by_all for each in records)


def _refuse_hooks(parameters: Mapping[str, Tensor]) -> None:
    """Raises PlanError for hooks on gradients that no backward() brings."""
    for name, parameter in parameters.items():
        if has_hooks(parameter):
            raise PlanError(
                f"{name} has a hook on its gradient, but backend(optimizer=) steps it "
                "in the call, without a backward(); leave optimizer= out, or remove "
                "the hook"
            )


def _mark_later(marked: Mapping[str, Tensor]) -> None:
    """Marks gradients once backward() has put them into .grad."""
    if marked:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(mark_gradients, marked))


def _function(step: Step) -> type[torch.autograd.Function]:
    """Which of the three below a call is."""
    if step.optimizers is not None:
        return _Updating
    return _InBackward if step.plan.loss is None else _InCall


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
        leaves: Leaves,
        *tensors: Tensor,
    ) -> tuple[Any, ...]:
        results = step.advance(step.start(args), None)
        step.unread += 1
        if step.unread == UNREAD:
            warnings.warn(FORGOTTEN, stacklevel=2)
        ctx.loss, ctx.gradients = step.plan.loss, step.gradients(results, leaves.inputs)
        ctx.marked = leaves.marked
        ctx.names = [output.name for output in step.plan.outputs]
        ctx.step, ctx.factor = step, step.factor
        return _mark(ctx, step, step.outputs(args, results))

    @staticmethod
    @_first_order
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        for position, gradient in enumerate(tangents):
            if gradient is not None and position != ctx.loss:
                raise PlanError(
                    f"output {ctx.names[position]!r} got a gradient, but B "
                    f"already ran in the call, from output {ctx.names[ctx.loss]!r}, "
                    "the loss; compute all of the loss in the model, or return no "
                    "scalar: then B runs in backward()"
                )
        gradients, ctx.gradients = ctx.gradients, None
        _once(gradients)
        ctx.step.unread = 0
        _mark_later(ctx.marked)
        incoming = tangents[ctx.loss]
        if incoming is None:
            return (None,) * (3 + len(gradients))
        half, linear = ctx.step.plan.half, ctx.step.plan.linear
        gradients = hand_over(gradients, incoming, ctx.factor, half, linear)
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
        leaves: Leaves,
        *tensors: Tensor,
    ) -> tuple[Any, ...]:
        assert step.optimizers is not None, "a plan with updates has an optimizer"
        try:
            results = step.advance(step.start(args), None)
            step.note_arrivals()
        finally:
            step.optimizers.end()
        return _mark(ctx, step, step.outputs(args, results))

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
        leaves: Leaves,
        *tensors: Tensor,
    ) -> tuple[Any, ...]:
        ctx.step, ctx.runs, ctx.leaves = step, step.start(args), leaves
        ctx.versions = [(tensor, tensor._version) for tensor in tensors]
        outputs = step.outputs(args, step.advance(ctx.runs, None))
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
        _mark_later(ctx.leaves.marked)
        if any(tensor._version != version for tensor, version in ctx.versions):
            raise RuntimeError(
                "fxsched: a parameter or input was changed in place between the call "
                "and its backward(); call optimizer.step() after backward()"
            )
        for gradient, output in zip(incoming, ctx.step.plan.outputs, strict=True):
            if gradient is not None and not output.takes_gradient:
                raise RuntimeError(
                    f"fxsched: output {output.name!r} got a gradient, but it is the "
                    f"{output.how} of the microbatches, and fxsched can't tell from "
                    "which microbatch it came; detach() the output, or compute it "
                    "outside of the model from an output with one row for each sample"
                )
        tangents = {}
        for i, (shape, dtype, device) in ctx.like.items():
            gradient = incoming[i]
            if gradient is None:
                gradient = torch.zeros(shape, dtype=dtype, device=device)
            tangents[i] = gradient.contiguous()
        results = ctx.step.advance(runs, tangents)
        leaves = ctx.leaves.inputs
        gradients = ctx.step.gradients(results, leaves)
        reached = _reached(incoming, ctx.step.plan.outputs)
        if reached is not None:
            pairs = zip(leaves, gradients, strict=True)
            gradients = [g if i in reached else None for i, g in pairs]
        return (None, None, None, *gradients)


def _reached(
    incoming: Sequence[Tensor | None], outputs: Sequence[Output]
) -> set[int] | None:
    """The inputs that these outputs' gradients reach; None for all."""
    reached = set[int]()
    for gradient, output in zip(incoming, outputs, strict=True):
        if gradient is not None:
            if output.leaves is None:
                return None
            reached |= output.leaves
    return reached


def _once(value: object) -> None:
    if value is None:
        raise RuntimeError(
            "fxsched: backward() a second time through one step; call the model again"
        )
