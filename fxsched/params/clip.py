"""Clipping by the norm of all gradients, on whichever ranks these are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..jobs.job import PlanError
from ..jobs.user_values import shown
from ..torch_compat.clipping import before_clipping
from ..transport.processes import everyone
from .rank_gradients import RankGradient
from .record import RECORDS, are_placed, note, piece, pieces_of, record_of

Piece = tuple[int, int]  # a position, and the number of a part of what is there
Norms = dict[torch.dtype, dict[Piece, float]]  # by the gradient's type


def clip_grad_norm_(
    model: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clips as torch.nn.utils.clip_grad_norm_, over the gradients of all ranks.

    Returns the norm of all gradients.

    model: a module, compiled or not, or parameters, in the same order on every rank.
    max_norm, norm_type, error_if_nonfinite: as for torch.

    Every rank must call it. Each parameter counts once: the first rank that updates the
    parameter computes its norm. The norms are combined as torch combines them, in the
    order of the parameters, so that the result has the same bits on every rank and
    under every schedule. In a process that has all gradients (threads, or no fxsched),
    torch's function runs. Raises PlanError if another rank calls another function, or
    if the program has already stepped the optimizer; RuntimeError for a norm that isn't
    finite, if error_if_nonfinite.
    """
    parameters = _parameters(model)
    check_gradients(parameters, "clip_grad_norm_")
    if not are_placed(parameters):
        clip: Any = torch.nn.utils.clip_grad_norm_
        total: Tensor = clip(parameters, max_norm, norm_type, error_if_nonfinite)
        return total
    by_position = gradient_norms_of("clip_grad_norm_", parameters, float(norm_type))
    # a number is its own norm
    norms = list(by_position.values())
    total = torch.nn.utils.get_total_norm(norms, float(norm_type))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so "
            "they cannot be clipped; error_if_nonfinite=False scales them all the same"
        )
    total = total.to(parameters[0].device)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _parameters(model: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Each once."""
    if isinstance(model, nn.Module):
        model = model.parameters()
    elif isinstance(model, Tensor):
        model = [model]
    elif not isinstance(model, Iterable):
        raise PlanError(
            f"clip_grad_norm_({shown(model)}, max_norm): give the model, or parameters"
        )
    return list({id(parameter): parameter for parameter in model}.values())


def gradient_norms_of(
    call: str, parameters: Sequence[Tensor], norm_type: float
) -> dict[int, Tensor]:
    """Norms of the gradients of parameters that ranks have between them, each by the
    first rank that updates it, by position; to the same bits on every rank."""
    rank = everyone(call).rank
    own = {
        (i, number): gradient
        for i, parameter in enumerate(parameters)
        if parameter.grad is not None
        for number, gradient in pieces_of(parameter, parameter.grad).items()
        if record_of(piece(parameter, number)).speaker == rank
    }
    return joined_norms(f"{call} of {len(parameters)} parameters", own, norm_type)


@torch.no_grad()
def joined_norms(
    call: str, own: Mapping[Piece, Tensor], norm_type: float
) -> dict[int, Tensor]:
    """Norms of tensors that ranks have between them, in the order of their positions.

    own: those that this rank speaks for, by position and number of the part.
    """
    with torch._C.DisableTorchFunctionSubclass():  # gradients of this rank, by design
        values = torch._foreach_norm(list(own.values()), norm_type) if own else ()
    norms: Norms = {}
    for position, value in zip(own, on_cpu(values), strict=True):
        norms.setdefault(value.dtype, {})[position] = value.item()
    every = everyone(call.split()[0]).agree(f"{call}, norm {norm_type}", norms)
    return _joined(every, norm_type)


def on_cpu(numbers: Sequence[Tensor]) -> list[Tensor]:
    """Numbers of devices, each in its type, by one copy: each copy waits."""
    if not numbers:
        return []
    device = numbers[0].device
    every = torch.stack([number.to(device) for number in numbers]).cpu()
    return [n.to(old.dtype) for n, old in zip(every, numbers, strict=True)]


def _joined(everyone: list[Norms], norm_type: float) -> dict[int, Tensor]:
    """All norms in the order of the parameters, in their types."""
    by_piece = {
        piece: torch.tensor(value, dtype=dtype)
        for norms in everyone
        for dtype, values in norms.items()
        for piece, value in values.items()
    }
    parts: dict[int, list[Tensor]] = {}
    for i, number in sorted(by_piece):
        parts.setdefault(i, []).append(by_piece[i, number])
    return {i: _of_parts(norms, norm_type) for i, norms in parts.items()}


def _of_parts(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of a tensor, of those of its parts; of order 0 it is how many numbers
    aren't 0."""
    if not norms[1:]:
        return norms[0]
    every = torch.stack(list(norms))
    return torch.linalg.vector_norm(every, norm_type) if norm_type else every.sum()


def note_stepped(parameters: Iterable[Tensor]) -> None:
    """From now on torch's functions that clip refuse these where they have no
    gradients: what they should clip is gone, for the program has stepped the
    optimizer."""
    for parameter in parameters:
        note(parameter, stepped=True)
    guard_clipping()


def guard_clipping() -> None:
    """Has torch's functions that clip refuse parameters whose gradients aren't here."""
    before_clipping(lambda: bool(RECORDS), _check, _check_norm)


def _check(name: str, parameters: Any) -> None:
    parameters = _parameters(parameters)
    check_gradients(parameters, name)
    if name == "clip_grad_norm_" and not all(
        record_of(each).is_updated_by_all for each in parameters
    ):
        raise _of_this_rank()


def _check_norm(_: str, gradients: Iterable[Any]) -> None:
    if any(isinstance(gradient, RankGradient) for gradient in gradients):
        raise _of_this_rank()


def _of_this_rank() -> PlanError:
    return PlanError(
        "torch.nn.utils.clip_grad_norm_ sees only the gradients of this rank; "
        "call fxsched.clip_grad_norm_(model, max_norm) on every rank"
    )


def check_gradients(parameters: Sequence[Tensor], name: str) -> None:
    """Raises PlanError where the program has used up the gradients."""
    if are_stepped(parameters):
        raise PlanError(
            f"{name} has no gradients to clip: the program has stepped the optimizer "
            "in the call; leave it out, and give fxsched.backend(schedule, "
            "optimizer=optimizer, clip_grad_norm=max_norm), or step in the loop"
        )


def are_stepped(parameters: Sequence[Tensor]) -> bool:
    """Whether the program has stepped them, and their gradients are gone."""
    if any(p.grad is not None for p in parameters):
        return False
    return any(record_of(parameter).stepped for parameter in parameters)
