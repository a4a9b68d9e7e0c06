"""Models that take a batch apart into a list of its rows, and put it together again.

That would make torch.export fix the batch's size. Here the whole stays whole, and its
size is only noted, as the one that this trace is for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..ir.graphs import tensors
from ..jobs.job import PlanError

ASKED = ("__get__", "dim", "size", "numel", "is_floating_point")


class Pin(NamedTuple):
    """A symbolic size, and what it was while the model was traced."""

    size: Any
    value: int


class _RowOf(NamedTuple):
    """A row, and where it is."""

    batch: Tensor
    position: int
    row: Tensor


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


class WholeBatches(TorchFunctionMode):
    """While it is open, rows of a batch that come together again are the batch.

    before: rows = x.unbind(0); y = cat(rows)
    after:  y = x.flatten(0, 1)
    """

    def __init__(self) -> None:
        super().__init__()
        self.pins: list[Pin] = []
        self._rows: dict[int, _RowOf] = {}  # by their ids
        self._listed: Tensor | None = None  # list(x) asks for len(x) after its rows

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        dim = named.get("dim", args[1] if len(args) > 1 else 0)
        listed, self._listed = self._listed, None
        if func is Tensor.__len__ and listed is args[0]:
            return len(self._all(listed))
        if func in (torch.unbind, Tensor.unbind) and dim == 0 and args:
            rows = self._unbound(args[0])
            if rows is not None:
                if sys._getframe(1).f_code is Tensor.__iter__.__code__:
                    self._listed = args[0]
                return rows
        if func in (torch.cat, torch.stack) and dim == 0 and args:
            whole = self._whole(args[0])
            if whole is not None:
                return whole if func is torch.stack else whole.flatten(0, 1)
        self._refuse(func, tensors((args, named)))
        return func(*args, **named)

    def _refuse(self, func: Callable[..., Any], operands: Iterable[Tensor]) -> None:
        """Raises PlanError for what is computed of one row: it has no values."""
        asked = getattr(func, "__name__", "") in ASKED
        if not asked and any(id(each) in self._rows for each in operands):
            raise PlanError(
                "the model goes through the batch row by row, which can't be cut into "
                "microbatches; compute with the whole batch at once"
            )

    def _unbound(self, batch: Tensor) -> tuple[Tensor, ...] | None:
        """The rows of a batch whose size is symbolic."""
        size = batch.shape[0]
        if not isinstance(size, torch.SymInt) or not size.node.has_hint():
            return None
        rows = tuple(batch.new_empty(batch.shape[1:]) for _ in range(self.pin(size)))
        for i, row in enumerate(rows):
            self._rows[id(row)] = _RowOf(batch, i, row)
        return rows

    def _whole(self, rows: Sequence[Tensor]) -> Tensor | None:
        """The batch that all of these are the rows of, in order."""
        known = [self._rows.get(id(row)) for row in rows]
        first = known[0] if known else None
        if first is None:
            return None
        every = self._all(first.batch)
        same = len(known) == len(every) and all(map(is_, known, every))
        return first.batch if same else None

    def returned(self, values: Sequence[Any], names: Sequence[str]) -> Returns:
        """What to return in the place of these values, whose rows are the batches'."""
        returns = Returns([], [], [])
        places: dict[int, int] = {}
        for value, name in zip(values, names, strict=True):
            row = self._rows.get(id(value))
            whole = value if row is None else row.batch
            if id(whole) not in places:
                places[id(whole)] = len(returns.values)
                returns.values.append(whole)
                # rows of a list are called as the list
                returns.names.append(name if row is None else name.rpartition("[")[0])
            place = places[id(whole)]
            returns.places.append(Place(place, None if row is None else row.position))
        return returns

    def _all(self, batch: Tensor) -> list[_RowOf]:
        return [each for each in self._rows.values() if each.batch is batch]

    def pin(self, size: Any) -> int:
        """What a symbolic size is in this call, noted."""
        value = int(size.node.hint)
        self.pins.append(Pin(size.node.expr, value))
        return value
