"""Sums over all parameters of a model, such as penalties, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..jobs.job import PlanError
from ..transport.processes import everyone
from .full_state import module_of, plain_name
from .record import are_placed, record_of


def parameter_sum(
    model: nn.Module, function: Callable[[str, nn.Parameter], Tensor | float]
) -> Tensor:
    """The sum of function(name, parameter) over all parameters of a model.

    model: the model, compiled or not.
    function: a function of a parameter's name in plain PyTorch and the parameter, which
        returns a number or a tensor of one element. It may read the parameter's .grad.

    Every rank must call parameter_sum. Each rank calls `function` for the parameters
    that it updates, and gets the sum over all parameters. backward() gives each rank
    the gradients of its own parameters, so that you can add the sum to the loss. Raises
    PlanError for weights that are cut into shards, or if another rank calls another
    function.
    """
    named = dict(module_of(model).named_parameters())
    if not are_placed(named.values()):
        return torch.as_tensor(
            sum(function(plain_name(n), p) for n, p in named.items())
        )
    cut = next((name for name, p in named.items() if record_of(p).parts), None)
    if cut is not None:
        raise PlanError(
            f"parameter_sum has no term of {cut}, which ranks have in parts; compute "
            "the sum in the model, or leave the weight whole by shards={names: ..}"
        )
    processes = everyone("parameter_sum")
    own: list[Tensor] = []
    numbers: dict[int, float] = {}
    for i, (name, parameter) in enumerate(named.items()):
        if record_of(parameter).is_updated(processes.rank):
            term = torch.as_tensor(function(plain_name(name), parameter))
            own.append(term.as_subclass(Tensor))
            if record_of(parameter).speaker == processes.rank:
                numbers[i] = term.detach().as_subclass(Tensor).item()
    every = processes.agree(f"parameter_sum of {len(named)} parameters", numbers)
    terms = {i: number for each in every for i, number in each.items()}
    total = torch.tensor(sum(terms[i] for i in sorted(terms)))
    whole: Any = _Whole.apply
    return whole(total, sum(own)) if own else total


class _Whole(torch.autograd.Function):
    """A sum over all ranks, whose gradient goes to this rank's part of it."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, own: Tensor) -> Tensor:
        return total.to(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient
