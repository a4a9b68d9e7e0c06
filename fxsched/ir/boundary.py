"""The mark that a model sets where a stage should end."""

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
    """The value itself; what reads it is in a later stage than what makes it.

    Works in any model, compiled or not: `x = fxsched.stage_boundary(x)`.
    Raises PlanError for what is no tensor.
    """
    if not isinstance(value, Tensor):
        raise PlanError(f"stage_boundary({shown(value)}): give a tensor")
    marked: Tensor = BOUNDARY(value)
    return marked
