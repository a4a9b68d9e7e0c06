"""What an optimizer holds of parameters that a rank gave up: nothing, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..jobs import PlanError
from .ownership import is_given_up

_GUARDS: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
_hook: RemovableHandle | None = None


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """In the order that numbers them in optimizer.state_dict()."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def guard_optimizers() -> None:
    """From their next step on, optimizers with parameters that this rank gave up drop
    their state and refuse a state_dict() that would lack it."""
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if optimizer not in _GUARDS and drop(optimizer):
        _GUARDS[optimizer] = optimizer.register_state_dict_pre_hook(_refuse)


def drop(optimizer: Optimizer) -> bool:
    """Drops the state of parameters that this rank gave up; whether it has such."""
    given_up = [p for p in parameters_of(optimizer) if is_given_up(p)]
    for parameter in given_up:
        optimizer.state.pop(parameter, None)
    return bool(given_up)


def _refuse(optimizer: Optimizer) -> None:
    raise PlanError(
        "this rank has the optimizer's state of its own parameters alone; save "
        "fxsched.full_optimizer_state_dict(model, optimizer), called on every rank"
    )


@contextmanager
def unguarded(optimizer: Optimizer) -> Iterator[None]:
    """Lets state_dict() through."""
    handle = _GUARDS.pop(optimizer, None)
    if handle is not None:
        handle.remove()
    try:
        yield
    finally:
        if handle is not None:
            _GUARDS[optimizer] = optimizer.register_state_dict_pre_hook(_refuse)
