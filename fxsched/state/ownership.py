"""Which ranks keep a parameter or buffer, and what the others hold in its place.

A parameter that a rank doesn't keep is one NaN there, expanded to its shape. It refuses
to be copied, saved or written: torch.save(model.state_dict()) and copy.deepcopy(model)
are errors that say what to call instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..ir.graphs import Spec
from ..jobs import PlanError


class Ownership(NamedTuple):
    """Which workers keep a parameter or buffer, and its shape and strides."""

    owners: tuple[int, ...]
    spec: Spec


# of all models of this process: a model may have several backends, one after another
OWNERSHIPS: MutableMapping[Tensor, Ownership] = WeakIdKeyDictionary()

READS = ("detach", "clone", "__deepcopy__", "__reduce_ex__")
WRITES = ("copy_",)


def give_up(name: str, tensor: Tensor, values: bool = True) -> None:
    """Makes a parameter or buffer refuse: its attributes shadow torch's methods.

    values: whether to let go of them too; those of a buffer are out of date here.
    """
    if values:
        nothing = torch.full((), torch.nan).to(tensor)
        tensor.data = nothing.expand(tensor.shape)
    owner = OWNERSHIPS[tensor].owners[0]
    for method in READS + WRITES:
        refusal = MethodType(_refusal(name, owner, method), tensor)
        setattr(tensor, method, refusal)


def is_given_up(tensor: Tensor) -> bool:
    """Whether this rank has given a tensor up to its owners."""
    return READS[0] in vars(tensor)


def first_owner(tensor: Tensor) -> int:
    """The rank that speaks for a tensor; rank 0 for one that no program reads."""
    return OWNERSHIPS[tensor].owners[0] if tensor in OWNERSHIPS else 0


def specs_of(values: Sequence[Any]) -> dict[int, Spec]:
    """What tensors among some values are where they are kept, by position."""
    return {
        i: OWNERSHIPS[value].spec._replace(dtype=value.dtype, device=value.device)
        for i, value in enumerate(values)
        if isinstance(value, Tensor) and value in OWNERSHIPS
    }


def stand_in(value: Any) -> Any:
    """Some values of the same shape for what this rank gave up, to be timed with."""
    if not isinstance(value, Tensor) or not is_given_up(value):
        return value
    some = specs_of([value])[0].empty().fill_(0.01)
    return some.requires_grad_(value.requires_grad)


def _refusal(name: str, owner: int, method: str) -> Callable[..., Any]:
    real = getattr(Tensor, method)
    remedy = (
        "load with fxsched.load_full_state_dict(model, state)"
        if method in WRITES
        else "save fxsched.full_state_dict(model)"
    )

    def refuse(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a trace reads no values
            return real(tensor, *args, **kwargs)
        raise PlanError(
            f"this rank has no values of {name}, which rank {owner} keeps; {remedy}, "
            "called on every rank"
        )

    return refuse


@contextmanager
def exchanged(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Puts values in place of what this rank holds of some tensors, for a while."""
    before = [(tensor.data, dict(vars(tensor))) for tensor in tensors]
    try:
        for tensor, value in zip(tensors, values, strict=True):
            for method in READS + WRITES:
                vars(tensor).pop(method, None)
            tensor.data = value
        yield
    finally:
        for tensor, (data, attributes) in zip(tensors, before, strict=True):
            tensor.data = data
            vars(tensor).update(attributes)
