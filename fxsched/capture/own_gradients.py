"""Gradients of a model's own making, which torch.export would leave out in silence."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..jobs.job import PlanError
from .export_errors import foreign


def _code(function: Any) -> CodeType:
    while not isinstance(function, FunctionType):
        function = function.__func__
    return function.__code__


# Operations that were registered with their gradients stay what they are in a graph.
OPERATIONS = os.path.join(os.path.dirname(torch.__file__), "_library")
MAKERS: Mapping[CodeType, str] = {
    _code(Function.apply): "a gradient of its own (torch.autograd.Function, or a "
    "backward hook of a module)",
    _code(Tensor.register_hook): "a hook on a gradient",
    _code(Tensor.register_post_accumulate_grad_hook): "a hook on a gradient",
}


def refuse_own_gradients(frame: FrameType) -> bool:
    """Raises PlanError, with the user's line, where a model starts to make one; gives
    whether other frames of this code may."""
    what, caller = MAKERS.get(frame.f_code), frame.f_back
    if what is None or not torch.is_grad_enabled():
        return what is not None
    if caller is not None and caller.f_code.co_filename.startswith(OPERATIONS):
        return True
    stack = traceback.extract_stack(frame)
    own = [each for each in stack if not foreign(each.filename)]
    where = "".join(traceback.format_list((own or list(stack))[-1:])).strip()
    raise PlanError(
        f"the model has {what}, which torch.export can't trace, at\n  {where}\n"
        "write it with torch operations (detach() where no gradient goes), or rewrite "
        "the line at which Dynamo breaks"
    )
