"""The random numbers of a plan, drawn again for eager PyTorch on the whole batch.

The numbers of a draw depend on the step, the draw's place in the model and, unless it
is made once for all, the microbatch. So each microbatch's part of an operation can draw
them again, and the parts are joined along the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ..ir import ops
from ..ir.graphs import Draw, Spec, draws


class DrawCall(NamedTuple):
    """An operation that draws in a microbatch; its tensors are Specs.

    outer: how many blocks of rows there are along the dimension that has them.
    """

    func: Any
    args: Any
    kwargs: Any
    draw: Draw
    outer: int


class Numbers:
    """The draws of a step: a microbatch's call of each, by its number in the model.

    base: the number that the step's random numbers come of. strange: the first
    operation that eager PyTorch doesn't draw with as the plan does, or nothing.
    """

    def __init__(self, base: int, microbatches: int) -> None:
        self.base, self.microbatches = base, microbatches
        self.calls: dict[int, DrawCall] = {}
        self.strange = ""

    def seed(self, draw: Draw, microbatch: int) -> int:
        """What a microbatch's draw is seeded with."""
        seeds = ops.seed(self.base, draw.number, microbatch)
        return seeds.replicated if draw.replicated else seeds.own


class PartDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the operations of one node the plan's numbers in a microbatch."""

    def __init__(
        self, numbers: Numbers, drawn: Sequence[Draw], microbatch: int, outer: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers, self.microbatch, self.outer = numbers, microbatch, outer
        self.drawn: Iterator[Draw] = iter(drawn)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        draw = next(self.drawn, None) if draws(func, args, kwargs) else None
        if draw is None:
            return func(*args, **kwargs)
        specs = tree_map_only(Tensor, Spec.of, (args, kwargs))
        call = DrawCall(func, specs[0], specs[1], draw, self.outer)
        self.numbers.calls.setdefault(draw.number, call)
        seed = self.numbers.seed(draw, self.microbatch)
        return ops.seeded(func, seed, *args, **kwargs)


class WholeDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives a model that runs on the whole batch the plan's numbers.

    Each draw moves torch's generator on, whose state says which one it is: a checkpoint
    that is computed again draws as before.
    """

    def __init__(self, numbers: Numbers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = numbers
        self.seen: dict[bytes, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        state = bytes(torch.get_rng_state().tolist())
        number = self.seen.setdefault(state, len(self.seen))
        torch.rand(())
        call = self.numbers.calls.get(number)
        if call is None or not _fits(call, func, args, kwargs, self.numbers):
            self.numbers.strange = self.numbers.strange or str(func)
            return func(*args, **kwargs)
        if call.draw.replicated:
            seed = self.numbers.seed(call.draw, 0)
            return ops.seeded(func, seed, *args, **kwargs)
        return _joined(call, args, kwargs, self.numbers)


def _joined(call: DrawCall, args: Any, kwargs: Any, numbers: Numbers) -> Any:
    """What an operation gives of all rows, with each microbatch's numbers."""
    count, parts = numbers.microbatches, []
    for b in range(count):
        own = _part(call, args, kwargs, count, b)
        result = ops.seeded(call.func, numbers.seed(call.draw, b), *own[0], **own[1])
        parts.append((result, _written(call.func, own[0])))
    result = call.func(*args, **kwargs)  # with other numbers, which are replaced
    whole = tree_leaves((result, _written(call.func, args)))
    for b, part in enumerate(parts):
        for into, value in zip(whole, tree_leaves(part), strict=True):
            dim = _dim(value.shape, into.shape)
            block = into if dim is None else _block(into, dim, call.outer, count, b)
            block.copy_(value.reshape(block.shape))
    return result


def _part(call: DrawCall, args: Any, kwargs: Any, count: int, b: int) -> Any:
    """A microbatch's arguments; its sizes, and of tensors its rows, in its layout."""

    def cut(spec: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return spec
        part = torch.empty_strided(
            spec.shape, spec.stride, dtype=value.dtype, device=value.device
        )
        dim = _dim(spec.shape, value.shape)
        own = value if dim is None else _block(value, dim, call.outer, count, b)
        return part.copy_(own.reshape(spec.shape))

    given, rest = (call.args, call.kwargs), (args, kwargs)
    return tree_map(cut, given, rest, is_leaf=_is_spec)


def _written(func: Any, args: Sequence[Any]) -> list[Any]:
    """The arguments that an operation writes into."""
    pairs = zip(func._schema.arguments, args, strict=False)
    return [arg for each, arg in pairs if each.alias_info and each.alias_info.is_write]


def _fits(call: DrawCall, func: Any, args: Any, kwargs: Any, numbers: Numbers) -> bool:
    """Whether a call on the whole batch is made of a microbatch's."""
    own = tree_leaves((call.args, call.kwargs), is_leaf=_is_spec)
    given = tree_leaves((args, kwargs))
    if func is not call.func or len(own) != len(given):
        return False
    for spec, value in zip(own, given, strict=True):
        if isinstance(value, Tensor) != _is_spec(spec):
            return False
        if isinstance(value, Tensor):
            pairs = list(zip(spec.shape, value.shape, strict=False))
            count = 1 if call.draw.replicated else numbers.microbatches
            apart = [pair for pair in pairs if pair[0] != pair[1]]
            grown = all(part * count == whole for part, whole in apart)
            if len(spec.shape) != value.dim() or len(apart) > 1 or not grown:
                return False
    return True


def _dim(part: Sequence[int], whole: Sequence[int]) -> int | None:
    """The dimension that has the rows, if one has."""
    pairs = enumerate(zip(part, whole, strict=True))
    return next((i for i, (p, w) in pairs if p != w), None)


def _block(value: Tensor, dim: int, outer: int, count: int, b: int) -> Tensor:
    """A view of a microbatch's rows of a value: [.., outer, rows, ..]."""
    if outer == 1:
        return value.chunk(count, dim)[b]
    return torch.unflatten(value, dim, (outer, count, -1)).select(dim + 1, b)


def _is_spec(value: Any) -> bool:
    return isinstance(value, Spec)
