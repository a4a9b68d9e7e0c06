"""Parameters and buffers whose values aren't made yet, and what makes them.

Until then such a tensor is one NaN, expanded to its shape. It is made when the first
call finds that its rank keeps it, and before that when it is copied, saved or loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..jobs.job import PlanError
from .intercepted import CASTS, READS, WRITES, intercept, let_through
from .record import RECORDS, Lazy, note, record_of


def leave_unmade(tensor: Tensor, lazy: Lazy) -> None:
    """Lets a tensor go of its memory until it is made."""
    nothing = torch.full((), torch.nan, dtype=lazy.spec.dtype)
    tensor.data = nothing.expand(lazy.spec.shape)
    address, version = tensor.data_ptr(), tensor._version
    note(tensor, lazy=lazy._replace(address=address, version=version))
    intercept(tensor, READS + WRITES + CASTS, _make_first)


def make(tensor: Tensor) -> None:
    """Gives a tensor its values, if it hasn't them yet."""
    lazy = unmade(tensor)
    if lazy is not None:
        _become(tensor, lazy, lazy.values())


def make_all(values: Sequence[Any]) -> None:
    """Makes the tensors among some values."""
    for value in values if RECORDS else ():
        if isinstance(value, Tensor):
            make(value)


def make_empty(tensor: Tensor) -> None:
    """Gives a tensor memory, if it has none yet, for values from elsewhere."""
    lazy = unmade(tensor)
    if lazy is not None:
        _become(tensor, lazy, lazy.spec.empty())


def load_later(
    tensor: Tensor,
    lazy: Lazy,
    read: Callable[[], Tensor],
    then: Callable[[], None] | None = None,
) -> None:
    """Has what `read` gives become the values of a tensor that isn't made yet."""

    def values() -> Tensor:
        return lazy.spec.empty().copy_(read())

    note(tensor, lazy=lazy._replace(values=values, then=then or lazy.then))


def forget(tensor: Tensor) -> None:
    """Drops what would make a tensor, if it isn't made yet."""
    if record_of(tensor).lazy is not None:
        note(tensor, lazy=None)
        let_through(tensor)


def unmade(tensor: Tensor) -> Lazy | None:
    """What makes a tensor; None, if it has values.

    Raises PlanError if something was written into it before it had.
    """
    lazy = record_of(tensor).lazy
    if lazy is None:
        return None
    first = torch.as_strided(tensor.data, (), ())  # also .data of it may be written
    written = tensor._version != lazy.version or not bool(first.isnan())
    moved = tensor.data_ptr() != lazy.address
    if moved and (written or any(tensor.stride())):
        forget(tensor)  # the user's tensor.data = values
        if lazy.then is not None:
            lazy.then()
        return None
    if moved or written:
        what = "was given the memory of another" if moved else "was written"
        raise PlanError(
            f"a parameter or buffer of shape {list(tensor.shape)} {what} before its "
            "values were made; do that in deferred(), or call "
            "fxsched.materialize(model) first"
        )
    return lazy


def _become(tensor: Tensor, lazy: Lazy, values: Tensor) -> None:
    forget(tensor)
    tensor.data = values
    if lazy.then is not None:
        lazy.then()


def _make_first(tensor: Tensor, method: str, *args: Any, **kwargs: Any) -> Any:
    if method in WRITES:
        make_empty(tensor)
    else:
        make(tensor)
    return getattr(type(tensor), method)(tensor, *args, **kwargs)
