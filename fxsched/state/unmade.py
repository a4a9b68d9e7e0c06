"""Parameters and buffers whose values aren't made yet, and what makes them.

Until then such a tensor is one NaN, expanded to its shape. It is made when the first
call finds that its rank keeps it, and before that when it is copied, saved or loaded.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..ir.graphs import Spec
from ..jobs.job import PlanError

READS = ("detach", "clone", "__deepcopy__", "__reduce_ex__")
WRITES = ("copy_",)
CASTS = ("to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16")


class Unmade(NamedTuple):
    """What a tensor is to be, and what makes its values.

    address, version: its NaN's, and how often that had been written.
    then: what is done once it is made, or was given memory.
    """

    spec: Spec
    values: Callable[[], Tensor]
    address: int = 0
    version: int = 0
    then: Callable[[], None] | None = None


UNMADE: MutableMapping[Tensor, Unmade] = WeakIdKeyDictionary()


def leave_unmade(tensor: Tensor, unmade: Unmade) -> None:
    """Lets a tensor go of its memory until it is made."""
    nothing = torch.full((), torch.nan, dtype=unmade.spec.dtype)
    tensor.data = nothing.expand(unmade.spec.shape)
    UNMADE[tensor] = unmade._replace(address=tensor.data_ptr(), version=tensor._version)
    for method in READS + WRITES + CASTS:
        setattr(tensor, method, MethodType(_making(method), tensor))


def make(tensor: Tensor) -> None:
    """Gives a tensor its values, if it hasn't them yet."""
    if is_unmade(tensor):
        _become(tensor, UNMADE[tensor].values())


def make_all(values: Sequence[Any]) -> None:
    """Makes the tensors among some values."""
    for value in values if UNMADE else ():
        if isinstance(value, Tensor):
            make(value)


def make_empty(tensor: Tensor) -> None:
    """Gives a tensor memory, if it has none yet, for values from elsewhere."""
    if is_unmade(tensor):
        _become(tensor, UNMADE[tensor].spec.empty())


def load_later(
    tensor: Tensor,
    read: Callable[[], Tensor],
    then: Callable[[], None] | None = None,
) -> None:
    """Has what `read` gives become the values of a tensor that isn't made yet."""
    unmade = UNMADE[tensor]

    def values() -> Tensor:
        return unmade.spec.empty().copy_(read())

    UNMADE[tensor] = unmade._replace(values=values, then=then or unmade.then)


def forget(tensor: Tensor) -> None:
    """Drops what would make a tensor, if it isn't made yet."""
    if UNMADE.pop(tensor, None) is not None:
        for method in READS + WRITES + CASTS:
            vars(tensor).pop(method, None)


def is_unmade(tensor: Tensor) -> bool:
    """Whether a tensor has no values yet.

    Raises PlanError if something was written into it all the same.
    """
    if not UNMADE or tensor not in UNMADE:
        return False
    unmade = UNMADE[tensor]
    first = torch.as_strided(tensor.data, (), ())  # also .data of it may be written
    written = tensor._version != unmade.version or not bool(first.isnan())
    if tensor.data_ptr() != unmade.address:
        if not (written or any(tensor.stride())):
            raise PlanError(
                f"a parameter or buffer of shape {list(tensor.shape)} was given the "
                "memory of another before its values were made; do that in deferred(), "
                "or call fxsched.materialize(model) first"
            )
        forget(tensor)  # the user's tensor.data = values
        if unmade.then is not None:
            unmade.then()
        return False
    if written:
        raise PlanError(
            f"a parameter or buffer of shape {list(tensor.shape)} was written before "
            "its values were made; do that in deferred(), or call "
            "fxsched.materialize(model) first"
        )
    return True


def _become(tensor: Tensor, values: Tensor) -> None:
    then = UNMADE[tensor].then
    forget(tensor)
    tensor.data = values
    if then is not None:
        then()


def _making(method: str) -> Callable[..., Any]:
    def make_first(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        real = getattr(type(tensor), method)
        if not torch.compiler.is_compiling():  # a trace reads no values
            if method in WRITES:
                make_empty(tensor)
            else:
                make(tensor)
        return real(tensor, *args, **kwargs)

    return make_first
