"""Norms of a model's parameters and gradients, on whichever ranks these are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ..jobs.job import PlanError
from ..transport.processes import everyone
from .clip import are_stepped, gradient_norms_of, joined_norms, on_cpu
from .cut_weights import parts_here
from .full_state import module_of, plain_name
from .record import are_placed, record_of

Joined = Callable[[str, list[Tensor], float], dict[int, Tensor]]


def parameter_norms(model: nn.Module, norm_type: float = 2.0) -> dict[str, Tensor]:
    """The norm of each parameter, by its name in plain PyTorch, on the CPU.

    model: the model, compiled or not.
    norm_type: as for torch.nn.utils.get_total_norm, which combines the values of this
        dict into one norm.

    Every rank must call it, and gets all norms, each from a rank with the newest
    values. Raises PlanError if another rank calls another function.
    """
    return _named("parameter_norms", model, norm_type, _of_parameters)


def gradient_norms(model: nn.Module, norm_type: float = 2.0) -> dict[str, Tensor]:
    """The norm of each parameter's gradient, by the parameter's name.

    Parameters without a gradient are left out. Arguments are those of parameter_norms.
    clip_grad_norm_ combines these norms into one.

    Raises PlanError if the program has already stepped the optimizer.
    """
    if are_stepped(list(module_of(model).parameters())):
        raise PlanError(
            "gradient_norms has no gradients: the program has stepped the optimizer in "
            "the call; leave optimizer= out of fxsched.backend and step in the loop"
        )
    return _named("gradient_norms", model, norm_type, gradient_norms_of)


def gradient_norm(model: nn.Module, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients, as clip_grad_norm_ returns it, without clipping."""
    norms = list(gradient_norms(model, norm_type).values())
    return torch.nn.utils.get_total_norm(norms, float(norm_type))


def _named(
    call: str, model: nn.Module, norm_type: float, joined: Joined
) -> dict[str, Tensor]:
    named = dict(module_of(model).named_parameters())
    tensors: list[Tensor] = list(named.values())
    names = [plain_name(name) for name in named]
    if are_placed(tensors):
        norms: Mapping[int, Tensor] = joined(call, tensors, float(norm_type))
    else:  # this process has all
        values = tensors if joined is _of_parameters else [t.grad for t in tensors]
        own = {i: v.detach() for i, v in enumerate(values) if v is not None}
        every = torch._foreach_norm(list(own.values()), norm_type) if own else ()
        norms = dict(zip(own, on_cpu(every), strict=True))
    return {names[i]: norm for i, norm in norms.items()}


def _of_parameters(
    call: str, tensors: list[Tensor], norm_type: float
) -> dict[int, Tensor]:
    rank = everyone(call).rank
    own = {
        (i, number): part.detach()
        for i, tensor in enumerate(tensors)
        for number, part in parts_here(tensor).items()
        if record_of(part).source == rank
    }
    return joined_norms(f"{call} of {len(tensors)} parameters", own, norm_type)
