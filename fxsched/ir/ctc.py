"""CTC loss with lengths as tensors, as an operation whose result's shape is known.

PyTorch's own also gives the table that its B reads, as long as the longest target,
which is known only when it runs. This one gives a loss for each sample, and B makes
the table again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("fxsched::ctc_rows", mutates_args=())
def ctc_rows(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The loss [samples] of each, of log_probs [time, samples, classes]."""
    lengths = input_lengths.tolist(), target_lengths.tolist()
    return _ctc(log_probs, targets, *lengths, blank, zero_infinity)[0]


@custom_op("fxsched::ctc_gradients", mutates_args=())
def ctc_gradients(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The gradient of log_probs, of those of the samples' losses."""
    lengths = input_lengths.tolist(), target_lengths.tolist()
    losses, table = _ctc(log_probs, targets, *lengths, blank, zero_infinity)
    backward: Any = torch.ops.aten._ctc_loss_backward
    given = gradient, log_probs, targets, *lengths, losses, table, blank, zero_infinity
    found: Tensor = backward(*given)
    return found


def _ctc(*args: Any) -> tuple[Tensor, Tensor]:
    ctc: Any = torch.ops.aten._ctc_loss
    losses, table = ctc(*args)
    return losses, table


@ctc_rows.register_fake
def _(log_probs: Tensor, *rest: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@ctc_gradients.register_fake
def _(gradient: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> Any:
    saved = ctx.saved_tensors
    found = ctc_gradients(gradient, *saved, ctx.blank, ctx.zero_infinity)
    return found, None, None, None, None, None


ctc_rows.register_autograd(_backward, setup_context=_keep)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """torch.nn.functional.ctc_loss, or torch.ctc_loss, whose reduction is a number."""
    if isinstance(reduction, int):
        reduction = ("none", "mean", "sum")[reduction]
    if log_probs.dtype in (torch.float16, torch.bfloat16):  # as autocast does
        log_probs = log_probs.float()
    alone = log_probs.dim() == 2
    if alone:
        log_probs = log_probs.unsqueeze(1)
    lengths = input_lengths.reshape(-1), target_lengths.reshape(-1)
    losses: Tensor = ctc_rows(log_probs, targets, *lengths, blank, zero_infinity)
    if zero_infinity:
        losses = losses.masked_fill(losses.isinf(), 0)
    if reduction == "mean":
        return (losses / lengths[1].clamp(min=1)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses.squeeze(0) if alone else losses
