"""Whether an optimizer steps some of a model's parameters, or parts of them, as it
would with all: found by a copy of it that steps small tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from ..ir.parts import Cut
from ..jobs.job import PlanError
from .optimizers import alone

STEPS = 8  # rates that adapt to distances move after a few
WAYS = (Cut(0, 1, 2), Cut(1, 1, 2), Cut(0, 2, 2))
_separate: WeakSet[Optimizer] = WeakSet()
_apart: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()


def check_separate(optimizer: Optimizer) -> None:
    """Raises PlanError for an optimizer that puts numbers of all parameters together.

    Each is tried once, with two small parameters together and with one alone.
    """
    if optimizer in _separate:
        return
    if not all(_is_separate(optimizer, group) for group in optimizer.param_groups):
        raise PlanError(
            f"{type(optimizer).__name__} steps each parameter with numbers from all "
            "parameters, and this rank has only some of them; use an optimizer that "
            "steps each parameter by itself, such as AdamW"
        )
    _separate.add(optimizer)


def check_apart(optimizer: Optimizer, weights: Sequence[Tensor]) -> None:
    """Raises PlanError for an optimizer that may not step parts of these weights.

    Each of its groups is tried once, with a small matrix and with its parts.
    """
    tried = _apart.setdefault(optimizer, set())
    cut = set(map(id, weights))
    for number, group in enumerate(optimizer.param_groups):
        weight = next((p for p in group["params"] if id(p) in cut), None)
        if number in tried or weight is None:
            continue
        why = None
        try:
            same = all(_same(optimizer, group, weight, cut) for cut in WAYS)
        except Exception as error:  # of a class that can't be made anew
            same = False
            why = f" ({type(error).__name__}: {str(error).splitlines()[0]})"
        if not same:
            raise PlanError(
                f"{type(optimizer).__name__} steps the parts of a weight otherwise "
                f"than the whole weight{why or ''}; use an optimizer that works "
                "element by element, such as AdamW, for weights that are cut, or leave "
                "these weights whole by shards={names: ..}"
            )
        tried.add(number)


def _is_separate(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a parameter is stepped as it would be alone; True, if a copy of the
    optimizer can't be stepped."""
    if isinstance(optimizer, LBFGS):
        return False
    device = group["params"][0].device
    numbers = torch.linspace(-1, 1, 16, device=device).view(4, 4)
    starts = [numbers, numbers * 10.0]
    gradients = [
        [(numbers.flip(0) + step / STEPS) * 30.0**i for i in range(2)]
        for step in range(STEPS)
    ]
    try:
        both = _stepped(optimizer, group, starts, gradients)
        one = _stepped(optimizer, group, starts[:1], [each[:1] for each in gradients])
    except Exception:  # of a class of the user's, that can't be made anew
        return True
    return torch.allclose(both, one, rtol=1e-5, atol=0)


def _same(
    optimizer: Optimizer, group: Mapping[str, Any], weight: Tensor, cut: Cut
) -> bool:
    """Whether parts of a small matrix change as all of it does."""
    device = "cpu" if weight.is_meta else weight.device
    numbers = torch.linspace(-1, 1, 64, device=device).view(8, 8)
    gradient = torch.linspace(0.1, 30, 64, device=device).view(8, 8).flip(0)
    if not float(group.get("lr", 1.0)):  # as in the first step of a warm-up
        group = {**group, "lr": 0.1}

    def change(start: Tensor, its: Tensor) -> Tensor:
        return _stepped(optimizer, group, [start], [[its], [its]])

    wanted = torch.stack(cut.of(change(numbers, gradient)))
    starts, its = torch.stack(cut.of(numbers)), torch.stack(cut.of(gradient))
    near = 1e-3 * float(wanted.abs().max())
    return all(
        torch.allclose(change(a, g), b, 1e-3, near)
        for a, g, b in ((starts[0], its[0], wanted[0]), (starts, its, wanted))
    )


def _stepped(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    starts: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> Tensor:
    """What steps on some parameters add to the first.

    gradients: of each, for each step.
    """
    parameters = [start.clone().requires_grad_() for start in starts]
    copy = alone(optimizer, group, parameters[0])
    copy.param_groups[0]["params"] = parameters
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        with torch.no_grad():
            copy.step()
    return parameters[0].detach() - starts[0]
