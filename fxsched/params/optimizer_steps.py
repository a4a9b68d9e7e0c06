"""Steps of the user's optimizers, on ranks that have a model between them.

An optimizer steps the parameters that its rank updates, in the place of cut weights
their parts here, with plain gradients, and keeps the state of these alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from ..jobs.job import PlanError
from .cut_weights import present
from .optimizer_trials import check_apart, check_separate
from .optimizers import parameters_of
from .rank_gradients import mark_again, unmarked
from .record import RECORDS, record_of, spec_of

_hooks: list[RemovableHandle] = []
_steps: WeakKeyDictionary[Optimizer, ExitStack] = WeakKeyDictionary()
_refusing: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()


def guard_optimizers(rank: int) -> None:
    """From their next step on, optimizers step what this rank has of a model, or are
    refused where they can't. Others step as they are."""

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
        if RECORDS:
            _begin(optimizer, rank, args, kwargs)

    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(before))
        _hooks.append(register_optimizer_step_post_hook(_end))


def _begin(
    optimizer: Optimizer, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    parameters = parameters_of(optimizer)
    elsewhere = updated_elsewhere(optimizer, rank)
    cut = [p for p in parameters if record_of(p).parts]
    if elsewhere:
        check_separate(optimizer)
    if cut:
        if any(map(callable, (*args[:2], kwargs.get("closure")))):
            raise PlanError(
                f"{type(optimizer).__name__}.step(closure) calls the model while its "
                "weights are the parts that this rank keeps; call it without a closure"
            )
        check_apart(optimizer, cut)
        cut_state(optimizer)
    guard(optimizer, elsewhere, bool(cut))
    _end(optimizer)  # of a step that raised
    stack = _steps[optimizer] = ExitStack()
    stack.callback(mark_again, unmarked(parameters))
    stack.enter_context(present(cut))


def guard(
    optimizer: Optimizer, elsewhere: Sequence[Tensor], parted: bool = False
) -> None:
    """Drops the state of parameters that other ranks update; if there are such, or
    parts of some (parted), a state_dict(), which would lack it, is refused from now on.
    """
    for parameter in elsewhere:
        optimizer.state.pop(parameter, None)
    if (elsewhere or parted) and optimizer not in _refusing:
        _refusing[optimizer] = optimizer.register_state_dict_pre_hook(_refuse)


def _end(optimizer: Optimizer, *_: Any) -> None:
    stack = _steps.pop(optimizer, None)
    if stack is not None:
        stack.close()


def updated_elsewhere(optimizer: Optimizer, rank: int) -> list[Tensor]:
    """Its parameters that a rank doesn't update."""
    return [p for p in parameters_of(optimizer) if not record_of(p).is_updated(rank)]


def cut_state(optimizer: Optimizer) -> None:
    """Leaves of an optimizer's state of whole weights that of the parts here, as of one
    that was loaded, or made before the weights were cut."""
    for weight in parameters_of(optimizer):
        own = record_of(weight).parts
        if own is None or weight not in optimizer.state:
            continue
        state, shape = optimizer.state[weight], spec_of(weight).shape
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == shape:
                state[key] = own.local(value).clone() if own.kept else value[:0]


def _refuse(optimizer: Optimizer) -> None:
    raise PlanError(
        "this rank has the optimizer's state of its own parameters alone; save "
        "fxsched.full_optimizer_state_dict(model, optimizer), called on every rank"
    )


@contextmanager
def unguarded(optimizer: Optimizer) -> Iterator[None]:
    """Lets state_dict() through."""
    handle = _refusing.pop(optimizer, None)
    if handle is not None:
        handle.remove()
    try:
        yield
    finally:
        if handle is not None:
            _refusing[optimizer] = optimizer.register_state_dict_pre_hook(_refuse)
