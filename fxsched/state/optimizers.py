"""What an optimizer holds of what other ranks update: nothing, and says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..jobs.job import PlanError
from .cuts import CUTS
from .ownership import is_updated

_GUARDS: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
_hook: RemovableHandle | None = None


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """In the order that numbers them in optimizer.state_dict()."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def guard_optimizers(rank: int) -> None:
    """From their next step on, optimizers with parameters that other ranks than this
    one update are guarded."""
    global _hook
    if _hook is None:

        def before(optimizer: Optimizer, *_: Any) -> None:
            if optimizer not in _GUARDS:
                cut = any(p in CUTS for p in parameters_of(optimizer))
                guard(optimizer, updated_elsewhere(optimizer, rank), cut)

        _hook = register_optimizer_step_pre_hook(before)


def updated_elsewhere(optimizer: Optimizer, rank: int) -> list[Tensor]:
    """Its parameters that a rank doesn't update."""
    return [p for p in parameters_of(optimizer) if not is_updated(p, rank)]


def guard(
    optimizer: Optimizer, elsewhere: Sequence[Tensor], parted: bool = False
) -> None:
    """Drops the state of parameters that other ranks update; if there are such, or
    parts of some (parted), a state_dict(), which would lack it, is refused from now on.
    """
    for parameter in elsewhere:
        optimizer.state.pop(parameter, None)
    if (elsewhere or parted) and optimizer not in _GUARDS:
        _GUARDS[optimizer] = optimizer.register_state_dict_pre_hook(_refuse)


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
