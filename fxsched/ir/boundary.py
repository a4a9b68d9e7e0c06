"""The function with which a model marks where a stage should end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from ..jobs.job import PlanError
from ..jobs.user_values import shown

LIBRARY: Any = Library("fxsched", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("stage_boundary(Tensor(a) value) -> Tensor(a)")
LIBRARY.impl("stage_boundary", lambda v: v.view_as(v), "CompositeImplicitAutograd")
BOUNDARY = torch.ops.fxsched.stage_boundary.default  # what a graph has of it


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def stage_boundary(value: Tensor) -> Tensor:
    """Ends a stage: operations that read the value run in a later stage.

    Returns the value itself. Works in any model, compiled or not: `x =
    fxsched.stage_boundary(x)`. Raises PlanError if the value isn't a tensor.
    """
    if not isinstance(value, Tensor):
        raise PlanError(f"stage_boundary({shown(value)}): give a tensor")
    marked: Tensor = BOUNDARY(value)
    return marked
