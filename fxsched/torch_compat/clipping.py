"""What torch.nn.utils.clip_grad_norm_ and clip_grad_value_ ask before they clip.

A rank has the gradients of some parameters, or, where the program steps the optimizer,
of none: clipping would go wrong without an error. All names of clip_grad_norm_, also
those that were imported before, end in clip_grad._clip_grads_with_norm_; of
clip_grad_value_ those two that PyTorch has are replaced.

Tried with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import clip_grad

from .patched import replace_once

Check = Callable[[str, Any], None]


def before_clipping(concerns: Callable[[], bool], check: Check) -> None:
    """Calls check(name of the function, its parameters) first, if concerns() says that
    there may be parameters of ours; else torch's function is called with what it got.
    """

    def around(name: str) -> Callable[..., Any]:
        def clip(real: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if concerns():
                check(name, parameters := _listed(parameters))
            return real(parameters, *args, **kwargs)

        return clip

    replace_once((clip_grad,), "_clip_grads_with_norm_", around("clip_grad_norm_"))
    value = "clip_grad_value_"
    replace_once((clip_grad, nn.utils), value, around(value))


def _listed(parameters: Any) -> Any:
    """Parameters that may be read twice."""
    return list(parameters) if hasattr(parameters, "__next__") else parameters
