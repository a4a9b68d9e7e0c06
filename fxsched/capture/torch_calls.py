"""What a model calls of torch, seen while torch.export runs it.

Models may take a batch apart into a list of its rows, and put it together again. That
would make torch.export fix the batch's size. Here the whole stays whole, and its size
is only noted, as the one that this trace is for.

They may read weights that they don't register: a global module's, those in a list.
torch.export would make constants of them, without a gradient.

Gradients of their own making, numbers that are not torch's and seeds are refused: they
would be left out, or the same in each call.
"""

from __future__ import annotations

import inspect
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode

from ..ir.graphs import storage, tensors
from ..jobs.job import PlanError
from .graph_breaks import foreign, own_frame, where_it_is

SEED, STATE = inspect.unwrap(torch.manual_seed).__code__, torch.set_rng_state.__code__
GRAD_FN: Any = Tensor.grad_fn
HOOKS: Mapping[Callable[..., Any], str] = {
    Tensor.register_hook: "a hook on a gradient",
    Tensor.register_post_accumulate_grad_hook: "a hook on a gradient",
    GRAD_FN.__get__: "what reads grad_fn, for hooks on it or such",
}
ASKED = ("__get__", "dim", "size", "numel", "is_floating_point")


@contextmanager
def without_drawn_numbers() -> Iterator[None]:
    """Raises PlanError if what is inside draws numbers of random or numpy.random."""
    python, numpy = random.getstate(), _numpy()
    before = numpy.get_state() if numpy else None
    try:
        yield
        drawn = ["random"] if random.getstate() != python else []
        if numpy and _text(numpy.get_state()) != _text(before):
            drawn.append("numpy.random")
    finally:
        random.setstate(python)
        if numpy:
            numpy.set_state(before)
    if drawn:
        raise PlanError(
            f"the model's forward draws numbers with {' and '.join(drawn)}, which "
            "tracing would make constants; draw them with torch (torch.rand), or "
            "outside of the model and pass them as tensors"
        )


def refuse_seeding(frame: FrameType) -> None:
    """Raises PlanError where a model that is traced seeds torch's generator."""
    code, caller = frame.f_code, frame.f_back
    own = code is STATE and caller and not foreign(caller.f_code.co_filename)
    if code is SEED or own:  # fork_rng sets the state back
        raise PlanError(
            f"the model's forward calls torch.{code.co_name}, which would happen "
            "once, while it is traced, and not in each call; call it before the model"
        )


def _numpy() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _text(state: Any) -> str:
    parts = [each.tobytes() if hasattr(each, "tobytes") else each for each in state]
    return str(parts)


def refuse_hooks(func: Callable[..., Any]) -> None:
    """Raises PlanError, with the user's line, if a function of torch that is called
    puts a hook on a gradient, or may."""
    if func in HOOKS:
        refuse_gradients(HOOKS[func])


def refuse_gradients(what: str) -> None:
    """Raises PlanError, with the user's line, for gradients of a model's own making."""
    if torch.is_grad_enabled():
        raise PlanError(
            f"the model has {what}, which torch.export can't trace, at\n"
            f"  {where_it_is(own_frame(traceback.extract_stack()))}\n"
            "use torch operations instead (detach() stops a gradient), or, if Dynamo "
            "breaks the graph at another line, rewrite that line"
        )


class Pin(NamedTuple):
    """A symbolic size, and what it was while the model was traced."""

    size: Any
    value: int


class Place(NamedTuple):
    """Where a value that the model returns is: which of those that the graph gives, and
    which of its rows, if it is one."""

    value: int
    row: int | None


class Returns(NamedTuple):
    """The values that a graph gives, their names, and where what the model returns is
    in them."""

    values: list[Any]
    names: list[str]
    places: list[Place]


class _Rows(NamedTuple):
    """A batch that was taken apart."""

    batch: Tensor
    rows: tuple[Tensor, ...]


class TorchCalls(TorchFunctionMode):
    """While it is open, rows of a batch that come together again are the batch.

    before: rows = x.unbind(0); y = cat(rows)
    after:  y = x.flatten(0, 1)

    pins: sizes that this trace is for. weights: that it doesn't register, by storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pins: list[Pin] = []
        self.weights: dict[int, nn.Parameter] = {}
        self._apart: list[_Rows] = []
        self._places: dict[int, tuple[_Rows, int]] = {}  # of rows, by their ids

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        refuse_hooks(func)
        named = dict(kwargs or {})
        dim = named.get("dim", args[1] if len(args) > 1 else 0)
        if func is Tensor.__len__:  # list(x) asks for it after its rows
            for apart in self._apart:
                if apart.batch is args[0]:
                    return len(apart.rows)
        if func in (torch.unbind, Tensor.unbind) and dim == 0 and args:
            rows = self._unbound(args[0])
            if rows is not None:
                return rows
        if func in (torch.cat, torch.stack) and dim == 0 and args:
            whole = self._whole(args[0])
            if whole is not None:
                return whole if func is torch.stack else whole.flatten(0, 1)
        asked = getattr(func, "__name__", "") in ASKED
        for each in tensors((*args, *named.values())):
            self._look(each, asked)
        if func is Tensor.contiguous:  # which leaves no node where nothing is copied
            func = torch.ops.aten.contiguous.default
        return func(*args, **named)

    def _look(self, operand: Tensor, asked: bool) -> None:
        """Notes a weight. Raises PlanError for what is computed of one row, which has
        no values, and for what would be a weight."""
        if id(operand) in self._places and not asked:
            raise PlanError(
                "the model goes through the batch row by row, which can't be cut into "
                "microbatches; compute with the whole batch at once, or call that part "
                "in eager PyTorch, and pass its result to the compiled rest of the "
                "model"
            )
        if isinstance(operand, FakeTensor):
            return
        if isinstance(operand, nn.Parameter):
            self.weights[storage(operand)] = operand
        elif operand.requires_grad:
            raise PlanError(
                f"the model reads a tensor of shape {list(operand.shape)} that has a "
                "gradient and isn't an argument or a parameter; make it an "
                "nn.Parameter, or pass it"
            )

    def _unbound(self, batch: Tensor) -> tuple[Tensor, ...] | None:
        """The rows of a batch whose size is symbolic."""
        size: Any = batch.shape[0]
        if not isinstance(size, torch.SymInt) or not size.node.has_hint():
            return None
        hint: Any = size.node.hint
        pin = Pin(size.node.expr, int(hint))
        rows = tuple(batch.new_empty(batch.shape[1:]) for _ in range(pin.value))
        apart = _Rows(batch, rows)
        self.pins.append(pin)
        self._apart.append(apart)
        self._places.update((id(row), (apart, i)) for i, row in enumerate(rows))
        return rows

    def _whole(self, rows: Sequence[Tensor]) -> Tensor | None:
        """The batch that all of these are the rows of, in order."""
        apart, _ = self._places.get(id(rows[0]) if rows else 0, (None, 0))
        if apart is None or len(rows) != len(apart.rows):
            return None
        return apart.batch if all(map(is_, rows, apart.rows)) else None

    def returned(self, values: Sequence[Any], names: Sequence[str]) -> Returns:
        """What to return in the place of these values, whose rows are the batches'."""
        returns = Returns([], [], [])
        positions: dict[int, int] = {}
        for value, name in zip(values, names, strict=True):
            apart, row = self._places.get(id(value), (None, None))
            whole = value if apart is None else apart.batch
            if id(whole) not in positions:
                positions[id(whole)] = len(returns.values)
                returns.values.append(whole)
                # rows of a list are called as the list
                returns.names.append(name if apart is None else name.rpartition("[")[0])
            returns.places.append(Place(positions[id(whole)], row))
        return returns
