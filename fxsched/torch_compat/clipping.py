"""What torch.nn.utils.clip_grad_norm_ and clip_grad_value_ ask before they clip.

A rank has the gradients of some parameters, or, where the program steps the optimizer,
of none: clipping would go wrong without an error. All names of clip_grad_norm_, also
those that were imported before, call clip_grad._get_total_norm with the gradients, then
clip_grad._clip_grads_with_norm_; of clip_grad_value_ those two that PyTorch has are
replaced.

Tried with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import clip_grad

from .patched import replace_once

Check = Callable[[str, Any], None]


def before_clipping(
    concerns: Callable[[], bool], check: Check, check_norm: Check
) -> None:
    """Calls check(name of the function, its parameters) first, and for clip_grad_norm_
    before that check_norm(name, gradients), if concerns() says that there may be
    parameters of ours; else torch's function is called with what it got.
    """

    def around(name: str, check: Check) -> Callable[..., Any]:
        def clip(real: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if concerns():
                check(name, tensors := _listed(tensors))
            return real(tensors, *args, **kwargs)

        return clip

    norm = "clip_grad_norm_"
    replace_once((clip_grad,), "_get_total_norm", around(norm, check_norm))
    replace_once((clip_grad,), "_clip_grads_with_norm_", around(norm, check))
    value = "clip_grad_value_"
    replace_once((clip_grad, nn.utils), value, around(value, check))


def _listed(tensors: Any) -> Any:
    """Tensors that may be read twice."""
    return list(tensors) if hasattr(tensors, "__next__") else tensors
