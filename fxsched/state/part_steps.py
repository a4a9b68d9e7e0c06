"""Optimizers step the parts of weights that this rank keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from ..ir.parts import Cut
from ..jobs.job import PlanError
from .cuts import CUTS, present
from .optimizer_bytes import alone
from .optimizers import parameters_of
from .ownership import spec_of

_STEPS: WeakKeyDictionary[Optimizer, ExitStack] = WeakKeyDictionary()
_TRIED: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()
_hooks: list[RemovableHandle] = []
WAYS = (Cut(0, 1, 2), Cut(1, 1, 2), Cut(0, 2, 2))


def guard_part_steps() -> None:
    """From their next step on, optimizers have parts in the place of weights that ranks
    have in parts, and of their own state."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before))
        _hooks.append(register_optimizer_step_post_hook(_after))


def _before(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    weights = [weight for weight in parameters_of(optimizer) if weight in CUTS]
    if not weights:
        return
    name = type(optimizer).__name__
    if any(map(callable, (*args[:2], kwargs.get("closure")))):
        raise PlanError(
            f"{name}.step(closure) calls the model while its weights are the parts "
            "that this rank keeps; call it without a closure"
        )
    check_apart(optimizer, weights)
    cut_state(optimizer)
    _after(optimizer)
    stack = _STEPS[optimizer] = ExitStack()
    stack.enter_context(present(weights))


def check_apart(optimizer: Optimizer, weights: Sequence[Tensor]) -> None:
    """Raises PlanError for an optimizer that may not step parts of these weights; each
    of its groups is tried once."""
    tried = _TRIED.setdefault(optimizer, set())
    cut = set(map(id, weights))
    for number, group in enumerate(optimizer.param_groups):
        weight = next((p for p in group["params"] if id(p) in cut), None)
        if number in tried or weight is None:
            continue
        why = _apart(optimizer, group, weight)
        if why is not None:
            raise PlanError(
                f"{type(optimizer).__name__} doesn't step parts of a weight as it "
                f"steps all of it{why}; take one that works element by element, such "
                "as AdamW, for weights that are cut, or leave those whole by "
                "shards={names: ..}"
            )
        tried.add(number)


def _after(optimizer: Optimizer, *_: Any) -> None:
    stack = _STEPS.pop(optimizer, None)
    if stack is not None:
        stack.close()


def cut_state(optimizer: Optimizer) -> None:
    """Leaves of an optimizer's state of whole weights that of the parts here, as of one
    that was loaded, or made before the weights were cut."""
    for weight in parameters_of(optimizer):
        if weight not in CUTS or weight not in optimizer.state:
            continue
        own, state = CUTS[weight], optimizer.state[weight]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == spec_of(weight).shape:
                state[key] = own.local(value).clone() if own.kept else value[:0]


def _apart(
    optimizer: Optimizer, group: Mapping[str, Any], weight: Tensor
) -> str | None:
    """Why an optimizer is not to step parts of a weight; None if it may.

    A copy of it takes two steps of a small matrix, and of its parts.
    """
    try:
        same = all(_same(optimizer, group, weight, cut) for cut in WAYS)
    except Exception as error:  # of a class that can't be made anew
        return f" ({type(error).__name__}: {str(error).splitlines()[0]})"
    return None if same else ""


def _same(
    optimizer: Optimizer, group: Mapping[str, Any], weight: Tensor, cut: Cut
) -> bool:
    """Whether parts of a small matrix change as all of it does."""
    device = "cpu" if weight.is_meta else weight.device
    numbers = torch.linspace(-1, 1, 64, device=device).view(8, 8)
    gradient = torch.linspace(0.1, 30, 64, device=device).view(8, 8).flip(0)
    start, its = torch.stack(cut.of(numbers)), torch.stack(cut.of(gradient))
    wanted = torch.stack(cut.of(_change(optimizer, group, numbers, gradient)))
    near = 1e-3 * float(wanted.abs().max())
    return all(
        torch.allclose(_change(optimizer, group, a, g), b, 1e-3, near)
        for a, g, b in ((start[0], its[0], wanted[0]), (start, its, wanted))
    )


def _change(
    optimizer: Optimizer, group: Mapping[str, Any], start: Tensor, gradient: Tensor
) -> Tensor:
    """What two steps add to a parameter."""
    parameter = start.clone().requires_grad_()
    copy = alone(optimizer, group, parameter)
    if not float(group.get("lr", 1.0)):  # as in the first step of a warm-up
        copy.param_groups[0]["lr"] = 0.1
    for _ in range(2):
        parameter.grad = gradient.clone()
        with torch.no_grad():
            copy.step()
    return parameter.detach() - start
