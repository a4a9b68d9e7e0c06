"""Gradients of a model's own making, which torch.export would leave out in silence."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from ..jobs.job import PlanError
from .user_frames import own_frame, where_it_is

APPLY: Any = inspect.getattr_static(Function, "apply")
ENTER: Any = saved_tensors_hooks.__enter__
GRAD_FN: Any = Tensor.grad_fn
# Operations that were registered with their gradients stay what they are in a graph.
OPERATIONS = os.path.join(os.path.dirname(torch.__file__), "_library")
HOOKS: Mapping[Callable[..., Any], str] = {
    Tensor.register_hook: "a hook on a gradient",
    Tensor.register_post_accumulate_grad_hook: "a hook on a gradient",
    GRAD_FN.__get__: "what reads grad_fn, for hooks on it or such",
}


@contextmanager
def no_own_gradients() -> Iterator[None]:
    """Raises PlanError, with the user's line, where a model makes one inside."""

    def apply(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
        if not sys._getframe(1).f_code.co_filename.startswith(OPERATIONS):
            _refuse(
                "a gradient of its own (torch.autograd.Function, or a backward hook "
                "of a module)"
            )
        return APPLY.__get__(None, kind)(*args, **kwargs)

    def enter(hooks: saved_tensors_hooks) -> None:
        # torch.utils.checkpoint's give tensors back as they were
        if type(hooks) is saved_tensors_hooks:
            _refuse("hooks on saved tensors")
        ENTER(hooks)

    own = "apply" in vars(Function)  # until torch 2.13
    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = ENTER  # type: ignore[method-assign]
        if own:
            Function.apply = APPLY  # type: ignore[method-assign]
        else:
            del Function.apply


def refuse_hooks(func: Callable[..., Any]) -> None:
    """Raises PlanError, with the user's line, if a function of torch that is called
    puts a hook on a gradient, or may."""
    if func in HOOKS:
        _refuse(HOOKS[func])


def _refuse(what: str) -> None:
    if torch.is_grad_enabled():
        raise PlanError(
            f"the model has {what}, which torch.export can't trace, at\n"
            f"  {where_it_is(own_frame(traceback.extract_stack()))}\n"
            "write it with torch operations (detach() where no gradient goes), or "
            "rewrite the line at which Dynamo breaks"
        )
