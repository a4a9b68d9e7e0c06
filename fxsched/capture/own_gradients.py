"""Gradients of a model's own making, which torch.export would leave out in silence."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from ..jobs.job import PlanError
from .export_errors import own_line

APPLY: Any = inspect.getattr_static(Function, "apply")


def _apply(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
    return APPLY.__get__(None, kind)(*args, **kwargs)


# Operations that were registered with their gradients stay what they are in a graph.
OPERATIONS = os.path.join(os.path.dirname(torch.__file__), "_library")
MAKERS: Mapping[CodeType, str] = {
    _apply.__code__: "a gradient of its own (torch.autograd.Function, or a "
    "backward hook of a module)",
    Tensor.register_hook.__code__: "a hook on a gradient",
    Tensor.register_post_accumulate_grad_hook.__code__: "a hook on a gradient",
    saved_tensors_hooks.__enter__.__code__: "hooks on saved tensors",
}
GRAD_FN: Any = Tensor.grad_fn  # whose hooks nothing else tells of


@contextmanager
def shown_functions() -> Iterator[None]:
    """Gives torch.autograd.Function.apply a frame; since torch 2.14 it has none."""
    own = "apply" in vars(Function)
    Function.apply = classmethod(_apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own:
            Function.apply = APPLY  # type: ignore[method-assign]
        else:
            del Function.apply


def refuse_own_gradients(frame: FrameType) -> bool:
    """Raises PlanError, with the user's line, where a model starts to make one; gives
    whether other frames of this code may."""
    what, caller = MAKERS.get(frame.f_code), frame.f_back
    if what is None:
        return False
    operation = caller and caller.f_code.co_filename.startswith(OPERATIONS)
    hooks = type(frame.f_locals.get("self"))
    # torch.utils.checkpoint's give tensors back as they were
    kept = issubclass(hooks, saved_tensors_hooks) and hooks is not saved_tensors_hooks
    if torch.is_grad_enabled() and not operation and not kept:
        raise _error(what, frame)
    return True


def refuse_grad_fn(func: object) -> None:
    """Raises PlanError, with the user's line, if a function of torch that is called
    reads Tensor.grad_fn, on which a model may put a hook."""
    if torch.is_grad_enabled() and func == GRAD_FN.__get__:
        raise _error("what reads grad_fn, for hooks on it or such", sys._getframe(1))


def _error(what: str, frame: FrameType) -> PlanError:
    where = own_line(traceback.extract_stack(frame))
    return PlanError(
        f"the model has {what}, which torch.export can't trace, at\n  {where}\n"
        "write it with torch operations (detach() where no gradient goes), or rewrite "
        "the line at which Dynamo breaks"
    )
