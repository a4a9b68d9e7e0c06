"""The scale of a loss whose gradients are float16, known before B runs.

B of a model that returns its loss runs in the call, before `scaler.scale(loss)`. So the
call asks the scaler for the scale, and B starts from it: small gradients don't flush to
0. What backward() then hands in is what B started from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..jobs.job import PlanError
from ..jobs.user_values import is_number

Scale = Callable[[], float]
Gradients = Sequence[Tensor | None]


def read_scale(scaler: object) -> Scale | None:
    """What gives a call's scale, from a GradScaler, a number or a function.

    Raises PlanError for anything else.
    """
    if scaler is None:
        return None
    if is_number(scaler) and scaler:
        number = _checked(scaler)
        return lambda: number
    scale = getattr(scaler, "get_scale", scaler)
    if not callable(scale):
        raise PlanError(
            f"backend(loss_scale={scaler!r}): give the GradScaler, a number above 0, "
            "or a function that returns one"
        )
    return lambda: _checked(scale())


def _checked(scale: object) -> float:
    if not (is_number(scale) and scale):
        raise PlanError(f"loss_scale gave {scale!r}; give a finite number above 0")
    return float(scale)  # type: ignore[arg-type]


def hand_over(
    gradients: list[Tensor | None],
    incoming: Tensor,
    factor: float | None,
    half: bool,
    linear: bool = True,
) -> Gradients:
    """Finished gradients times what backward() hands in for the loss.

    gradients: on devices, each is replaced in this list.
    factor: the scale that B started from; None if there was none.
    half: whether B computed in float16. linear: whether gradients are in proportion to
        what B starts from.
    Raises RuntimeError if a scale comes that B should have started from.
    """
    if linear and factor is None and not half and incoming.device.type != "cpu":
        # to read the number would wait for the device; each copy replaces its original
        for i, g in enumerate(gradients):
            gradients[i] = None if g is None else g * incoming
        return gradients
    given, start = float(incoming), factor or 1.0
    if not linear and given != start:
        raise RuntimeError(
            f"fxsched: backward() starts from a gradient of {given:g} for "
            f"the loss, but B already ran in the call, from {start:g}, and a "
            "backward of the model's own (torch.autograd.Function, register_hook) "
            "doesn't give gradients in proportion; call loss.backward() on what the "
            "model returned, or write fxsched.backend(schedule, "
            f"loss_scale={given:g}), so that B starts from that"
        )
    if half and factor is None and given > 1.0:
        raise RuntimeError(
            f"fxsched: the loss is scaled by {given:g}, but B already ran in "
            "the call, in float16, where small gradients became 0; give the scaler to "
            "the backend, fxsched.backend(schedule, loss_scale=scaler), so that B "
            "starts from the scale"
        )
    if given == start:
        return gradients
    return [None if g is None else g * (given / start) for g in gradients]


def overflowed(gradients: Gradients) -> bool:
    """Whether some gradient is not finite; waits for the device once."""
    some = [g for g in gradients if g is not None and g.numel()]
    return not torch.nn.utils.get_total_norm(some, math.inf).isfinite()


def infinite(gradients: Gradients) -> Gradients:
    """The same, so that a GradScaler skips the step: another rank's overflowed."""
    return [None if g is None else torch.full_like(g, math.inf) for g in gradients]
