"""Sees the gradients of its own that a model makes while torch.export runs it.

torch.export calls a torch.autograd.Function's forward as if it were the model's code,
and leaves its backward out, as hooks on saved tensors. In force only while a model is
traced.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

APPLY: Any = inspect.getattr_static(Function, "apply")
ENTER: Any = saved_tensors_hooks.__enter__
# Operations that were registered with their gradients stay what they are in a graph.
OPERATIONS = os.path.join(os.path.dirname(torch.__file__), "_library")


@contextmanager
def own_gradients(see: Callable[[str], None]) -> Iterator[None]:
    """Calls `see` with what it is, where a model makes one inside."""

    def apply(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
        if not sys._getframe(1).f_code.co_filename.startswith(OPERATIONS):
            see(
                "a gradient of its own (torch.autograd.Function, or a backward hook "
                "of a module)"
            )
        return APPLY.__get__(None, kind)(*args, **kwargs)

    def enter(hooks: saved_tensors_hooks) -> None:
        # torch.utils.checkpoint's give tensors back as they were
        if type(hooks) is saved_tensors_hooks:
            see("hooks on saved tensors")
        ENTER(hooks)

    own = "apply" in vars(Function)  # until torch 2.13
    function: Any = Function
    function.apply = classmethod(apply)
    saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = ENTER  # type: ignore[method-assign]
        if own:
            function.apply = APPLY
        else:
            del function.apply
