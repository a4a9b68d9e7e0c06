"""The mark that a model sets where a stage should end."""

from __future__ import annotations

import torch
from torch import Tensor

from ..jobs.job import PlanError
from ..jobs.user_values import shown


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def stage_boundary(value: Tensor) -> Tensor:
    """The value itself; what reads it is in a later stage than what makes it.

    Works in any model, compiled or not: `x = fxsched.stage_boundary(x)`.
    Raises PlanError for what is no tensor.
    """
    if not isinstance(value, Tensor):
        raise PlanError(f"stage_boundary({shown(value)}): give a tensor")
    return value.view_as(value)
