"""Whether what lengths= adds reaches what a model returns: tried before it is planned.

The model's graph runs on a few samples as they are and filled up, in float64, where
what a mask hides is zero and what rounding does is far below what one position more
does.
Weights are random there: those of a new model may be zeros that hide what they will
show once trained, and a rank hasn't all of them. What dropout draws is all ones.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..capture.batch import resized
from ..capture.graph_inputs import origin_of, placeholders
from ..capture.picked_rows import cut_outputs
from ..capture.samples import samples_of
from ..ir.graphs import is_view, tensors
from ..ir.modes import modes_after_errors
from ..ir.request import Request
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from ..state.ownership import is_given_up, spec_of
from .lengths import FilledCall

CLOSE = 1e-8  # of an output's largest value
NARROW = (torch.float32, torch.bfloat16, torch.float16)


class LengthsWarning(UserWarning):
    """What lengths= adds could not be told to leave the model's results as they are."""


def check_filled(
    gm: fx.GraphModule, args: tuple[Any, ...], call: FilledCall, request: Request
) -> bool:
    """Whether later calls needn't be tried; says why not, or why nothing can be.

    args: of the call, before it was filled up.
    Raises PlanError for a model whose results depend on what fills lengths up.
    """
    if any(_is_missing(value) for value in args):
        _warn(call, "this rank has given up buffers that it reads")
        return True
    try:
        wanted = _results(gm, _few(gm, args, request))
    except Exception as error:  # of the model's own, or of what float64 isn't for
        _warn(call, f"it doesn't run in float64: {_line(error)}")
        return True
    try:
        found = _results(gm, _few(gm, call.args, request))
    except Exception as error:
        raise PlanError(
            f"backend(lengths=) fills up {call.what}, and the model doesn't run so: "
            f"{_line(error)}; let it take such lengths, or leave lengths= out"
        ) from error
    pairs = _pairs(gm, args, call, wanted, found)
    for name, one, other in pairs:
        if not _equal(one, other):
            raise PlanError(
                f"backend(lengths=) fills up {call.what}, and {name} depends on what "
                "is added; let the model leave it out (an attention_mask, labels that "
                "the loss ignores, a mean over the mask), fill it up with what the "
                "model takes for nothing, or leave lengths= out"
            )
    if found.nan is not None and wanted.nan is None:
        raise PlanError(
            f"backend(lengths=) fills up {call.what}, of which "
            f"{found.nan.name} makes NaN, as gradients would be; let it make numbers "
            "(a softmax over positions that are all hidden divides by 0), or leave "
            f"lengths= out{line_of(found.nan.meta.get('stack_trace'))}"
        )
    unknown = [name for name, one, _ in pairs if _is_nothing(one)]
    if unknown:
        _warn(call, f"{unknown[0]} is not finite in this call, the next will tell")
    return not unknown


def _pairs(
    gm: fx.GraphModule,
    args: Sequence[Any],
    call: FilledCall,
    wanted: _Results,
    found: _Results,
) -> list[tuple[str, Any, Any]]:
    """What is to be equal: outputs, and buffers after the call."""
    others = cut_outputs(gm, call.trimmed(gm, found.outputs))
    labels = [_label(each.label) for each in gm.meta["returns"]]
    pairs = list(zip(labels, cut_outputs(gm, wanted.outputs), others, strict=False))
    buffers = [
        (f"the buffer {origin_of(node).name}", wanted.state[i], found.state[i])
        for i, node in enumerate(placeholders(gm))
        if i in wanted.state and args[i] is call.args[i]
    ]
    return pairs + buffers


def _few(
    gm: fx.GraphModule, args: tuple[Any, ...], request: Request
) -> tuple[Any, ...]:
    """The call with a microbatch's samples, at least two."""
    count = request.schedule.microbatches
    if count == 1:
        return args
    samples, cut = samples_of(gm, args, request)
    rows = min(samples, max(2, samples // count))
    new = {}
    for entry in cut:
        assert entry.dim is not None
        length = rows * (entry.length // samples)
        new[entry.input] = args[entry.input].narrow(entry.dim, 0, length)
    return resized(gm, args, new)


class _Results(NamedTuple):
    """What a graph returns and what it leaves in tensors that aren't weights; and the
    first node with a NaN."""

    outputs: Sequence[Any]
    state: Mapping[int, Tensor]
    nan: fx.Node | None


def _results(gm: fx.GraphModule, args: Sequence[Any]) -> _Results:
    own = {
        i: _wide(value.detach().clone())
        for i, value in enumerate(args)
        if isinstance(value, Tensor) and not _is_weight(value)
    }
    values = [own.get(i, value) for i, value in enumerate(args)]
    devices = list(range(torch.cuda.device_count()))
    trial = _Trial(gm)
    with modes_after_errors(), torch.no_grad(), torch.random.fork_rng(devices):
        return _Results(trial.run(*values), own, trial.nan)


class _Trial(fx.Interpreter):
    """Runs a graph with random weights, each made where it is read."""

    nan: fx.Node | None = None

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return _wide(value) if isinstance(value, Tensor) else value

    def run_node(self, n: fx.Node) -> Any:
        weights = {
            read: self.env[read]
            for read in n.all_input_nodes
            if _is_weight(self.env[read])
        }
        for read, weight in weights.items():
            self.env[read] = _random(weight, str(read.target))
        try:
            # not around all: weights are to be random
            with _Float64():  # type: ignore[no-untyped-call]
                value = super().run_node(n)
        finally:
            self.env.update(weights)
        if (
            self.nan is None
            and n.op.startswith("call")
            and any(map(_is_nan, tensors(value)))
        ):
            self.nan = n
        return value


def _random(weight: Tensor, name: str) -> Tensor:
    """A weight's stand-in: the same for one name, as large as new weights are."""
    spec = spec_of(weight)
    generator = torch.Generator().manual_seed(sum(name.encode()) * len(name))
    some = torch.randn(spec.shape, dtype=torch.float64, generator=generator)
    if len(spec.shape) < 2:
        some = 1 + some / 8
    else:
        some /= max(1, math.prod(spec.shape[1:])) ** 0.5
    return some.to(spec.device)


class _Float64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations in float64, without what random numbers do to lengths."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(_wide_type, (args, kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _undrawn(func, args, kwargs)
        value = func(*args, **kwargs)
        return value if is_view(func) else tree_map(_wide, value)


def _undrawn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation gives where each of its draws is the same."""
    name = func._schema.name
    names = [a.name for a in func._schema.arguments]
    if "bernoulli" not in name:
        for p in {"p", "dropout_p"} & set(names):
            at = names.index(p)
            args = tuple(0.0 if i == at else each for i, each in enumerate(args))
            kwargs = {k: 0.0 if k == p else each for k, each in kwargs.items()}
            return tree_map(_wide, func(*args, **kwargs))
    if any(word in name for word in ("perm", "multinomial")):
        raise NotImplementedError(f"{name} draws numbers that depend on the length")
    value = func(*args, **kwargs)
    drawn = 1.0 if "bernoulli" in name else 0.5
    if not value.is_floating_point():
        drawn = value.flatten()[0] if value.numel() else 0
    return _wide(value.fill_(drawn))


def _wide(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in NARROW
    return value.double() if narrow else value


def _wide_type(value: Any) -> Any:
    return torch.float64 if value in NARROW else value


def _is_weight(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) and value.is_floating_point()


def _is_missing(value: Any) -> bool:
    return isinstance(value, Tensor) and is_given_up(value) and not _is_weight(value)


def _is_nan(value: Tensor) -> bool:
    return value.is_floating_point() and bool(value.isnan().any())


def _is_nothing(value: Any) -> bool:
    """Whether a result says nothing, such as the mean over no labels."""
    known = isinstance(value, Tensor) and value.is_floating_point() and value.numel()
    return bool(known) and not value.isfinite().any()


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    largest = one[one.isfinite()].abs().max() if one.isfinite().any() else 1.0
    close = torch.isclose(one, other, 0.0, CLOSE * float(largest), equal_nan=True)
    return bool(close.all())


def _label(label: int | str | None) -> str:
    return "what it stores" if label is None else f"output {label!r}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _warn(call: FilledCall, why: str) -> None:
    warnings.warn(
        f"backend(lengths=) fills up {call.what}, and whether the model's results "
        f"depend on what is added was not tried: {why}; fxsched.verify compares them",
        LengthsWarning,
        stacklevel=2,
    )
