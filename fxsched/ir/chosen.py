"""Operations on as many rows as values say, such as x[mask], as one operation.

Inside it sizes are those that the run finds. From outside they are fixed: what it gives
is filled up with zeros to the most that there can be, beside its true shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import custom_op
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from ..jobs.job import PlanError
from .graphs import Spec, draws, storage, tensors

LIMIT = 2**62  # of sizes: those that PyTorch knows nothing of are just below 2**63


class Selection(NamedTuple):
    """A graph of tensors and numbers; it gives a list of tensors, of which those at
    `open` have sizes that its run finds."""

    gm: fx.GraphModule
    open: tuple[int, ...]


class Bounds(NamedTuple):
    """The largest results that a selection may have, and its FLOPs then."""

    results: tuple[Spec, ...]
    flops: int


SELECTIONS: dict[str, Selection] = {}


def keep_selection(selection: Selection) -> str:
    """The name of a selection, on all ranks the same, for its operations."""
    text = f"{selection.gm.code}{selection.open}"
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    SELECTIONS.setdefault(name, selection)
    return name


@custom_op("fxsched::chosen_rows", mutates_args=())
def chosen_rows(name: str, values: list[Tensor], numbers: list[int]) -> list[Tensor]:
    """The results of a selection, filled up, and then the shapes of the open ones."""
    selection = SELECTIONS[name]
    results = selection.gm(*values, *numbers)
    largest = bounds(name, tuple(map(Spec.of, values)), tuple(numbers)).results
    shapes = [shape_of(results[i]) for i in selection.open]
    return [*map(_filled, results, largest), *shapes]


def shape_of(value: Tensor) -> Tensor:
    """The shape of a value, on its device. Memory that isn't pinned is staged before
    .to() returns, so that nothing has to wait for the copy."""
    return torch.tensor(value.shape).to(value.device, non_blocking=True)


@custom_op("fxsched::chosen_gradients", mutates_args=())
def chosen_gradients(
    name: str,
    values: list[Tensor],
    numbers: list[int],
    wanted: list[int],
    gradients: list[Tensor],
) -> list[Tensor]:
    """The gradients of the values at `wanted`, of those of the results that are no
    integers; the selection is computed again."""
    whole = list(values)
    with _keys_of_a_new_thread(), torch.enable_grad():
        for i in wanted:
            whole[i] = values[i].detach().requires_grad_()
        results = SELECTIONS[name].gm(*whole, *numbers)
        floating = [each for each in results if each.is_floating_point()]
        pairs = zip(floating, gradients, strict=True)
        own = [(each, _cut(g, each.shape)) for each, g in pairs if each.requires_grad]
        found = torch.autograd.grad(
            [result for result, _ in own],
            [whole[i] for i in wanted],
            [gradient for _, gradient in own],
            materialize_grads=True,
        )
    return [_filled(gradient, Spec.of(gradient)) for gradient in found]


def _keys_of_a_new_thread() -> AbstractContextManager[None]:
    """While it is open, PyTorch dispatches as in a thread in which nothing was called:
    an operation's own code is below autograd, and Inductor's below all else."""
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(*_new_keys())
    return guard


@cache
def _new_keys() -> tuple[Any, Any]:
    sets = (
        torch._C._dispatch_tls_local_include_set,
        torch._C._dispatch_tls_local_exclude_set,
    )
    with ThreadPoolExecutor(1) as thread:
        include, exclude = thread.map(lambda keys: keys(), sets)
    return include, exclude


@chosen_rows.register_fake
def _(name: str, values: list[Tensor], numbers: list[int]) -> list[Tensor]:
    largest = bounds(name, tuple(map(Spec.of, values)), tuple(numbers)).results
    results = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in largest]
    opened = [results[i] for i in SELECTIONS[name].open]
    shapes = [each.new_empty(each.dim(), dtype=torch.int64) for each in opened]
    return results + shapes


@chosen_gradients.register_fake
def _(
    name: str,
    values: list[Tensor],
    numbers: list[int],
    wanted: list[int],
    gradients: list[Tensor],
) -> list[Tensor]:
    return [values[i].new_empty(values[i].shape) for i in wanted]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.name, values, ctx.numbers = inputs
    ctx.wanted = [i for i, value in enumerate(values) if value.requires_grad]
    ctx.floating = [i for i, each in enumerate(output) if each.is_floating_point()]
    ctx.save_for_backward(*values)


def _backward(ctx: Any, gradients: list[Tensor]) -> Any:
    values = list(ctx.saved_tensors)
    floating = [gradients[i] for i in ctx.floating]
    found = chosen_gradients(ctx.name, values, ctx.numbers, ctx.wanted, floating)
    of = dict(zip(ctx.wanted, found, strict=True))
    # a list of numbers is one argument to PyTorch, an empty one a list of tensors
    none: list[None] | None = None if ctx.numbers else []
    return None, [of.get(i) for i in range(len(values))], none


chosen_rows.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.fxsched.chosen_rows, get_raw=True)
def _(name: str, values: Any, numbers: Any, out_val: object = None) -> int:
    return bounds(name, tuple(map(Spec.of, values)), tuple(numbers)).flops


@register_flop_formula(torch.ops.fxsched.chosen_gradients, get_raw=True)
def _(name: str, values: Any, numbers: Any, *rest: Any, out_val: object = None) -> int:
    return 3 * bounds(name, tuple(map(Spec.of, values)), tuple(numbers)).flops


@cache
def bounds(name: str, values: tuple[Spec, ...], numbers: tuple[int, ...]) -> Bounds:
    """Those for values of these shapes: run once, on fake tensors.

    Raises PlanError for what no operation can do: draw random numbers, which B would
    draw again, or write into what others read.
    """
    environment = ShapeEnv()
    counter = FlopCounterMode(display=False)
    with unset_fake_temporarily(), FakeTensorMode(shape_env=environment):
        fakes = [spec.empty() for spec in values]
        with torch.no_grad(), _Guard(set(map(storage, fakes))), counter:
            results = SELECTIONS[name].gm(*fakes, *numbers)
    most = partial(_most, environment)
    specs = [
        Spec(tuple(map(most, each.shape)), (), each.dtype, each.device)
        for each in results
    ]
    return Bounds(tuple(specs), most(counter.get_total_flops()))


def _most(environment: ShapeEnv, size: Any) -> int:
    """The most that a size can be."""
    if isinstance(size, int):
        return size
    upper = environment.bound_sympy(size.node.expr).upper
    if upper >= LIMIT:
        raise PlanError(
            "the number of rows depends on values and has no upper limit; compute it "
            "outside the model"
        )
    return int(upper)


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises PlanError for effects of operations. kept: storages of others."""

    def __init__(self, kept: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if draws(func, args, kwargs or {}):
            raise PlanError(
                "random numbers are drawn for a number of rows that depends on values; "
                "draw them for all rows, before rows are picked"
            )
        written = tensors(args[:1]) if func._schema.is_mutable else ()
        if not self.kept.isdisjoint(map(storage, written)):
            raise PlanError(
                "the model writes into a tensor that it computes from rows picked by "
                "value; write into a copy"
            )
        return func(*args, **(kwargs or {}))


def cut_to_shape(filled: Tensor, shape: Tensor) -> Tensor:
    """A result as it was before it was filled up."""
    return _cut(filled, shape.tolist())


def _cut(filled: Tensor, shape: Sequence[int]) -> Tensor:
    return filled[tuple(map(slice, shape))]


def _filled(value: Tensor, largest: Spec) -> Tensor:
    """A copy of a value, in the order of its dimensions, with zeros after its own."""
    filled = value.new_zeros(largest.shape)
    _cut(filled, value.shape).copy_(value)
    return filled
