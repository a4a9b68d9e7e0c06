"""torch.optim.swa_utils.AveragedModel of a model of which a rank keeps some.

It copies the model and averages all parameters, also those that aren't here; it has no
hook for either.

Tried with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from .patched import replace_once

Around = Callable[[Any, nn.Module], AbstractContextManager[None]]


def around_averages(
    concerns: Callable[[nn.Module], bool], copying: Around, averaging: Around
) -> None:
    """Copies models that this concerns inside of copying(averaged, model), and averages
    them inside of averaging(averaged, model)."""

    def inside(around: Around) -> Callable[..., Any]:
        def call(
            real: Any, averaged: Any, model: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if not concerns(model):
                return real(averaged, model, *args, **kwargs)
            with around(averaged, model):
                return real(averaged, model, *args, **kwargs)

        return call

    replace_once((AveragedModel,), "__init__", inside(copying))
    replace_once((AveragedModel,), "update_parameters", inside(averaging))
