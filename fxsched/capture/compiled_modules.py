"""What torch.compile makes of a module, where Dynamo breaks the module's graph."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch._dynamo import OptimizedModule
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..ir.request import Request
from ..jobs.job import PlanError
from .graph_breaks import GraphBreak


def export_broken_modules() -> None:
    """Makes torch.compile's modules go on by torch.export, once Dynamo breaks them.

    Only torch.compile's module knows the model, and all of a call; Dynamo itself sees
    a frame, which it can't return from. So this stands around the module's call: at a
    GraphBreak, before which nothing of the model has run, it becomes what the backend
    makes of the model. Dynamo looks through such modules, and never traces it.
    """
    original: Any = OptimizedModule.__call__
    if getattr(original, "fxsched", False):
        return

    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_dispatch_stack():
            _refuse_modes(self)
        try:
            return original(self, *args, **kwargs)
        except GraphBreak as error:
            broken = error
        if broken.backend is None:
            raise broken
        exported = broken.backend.exported(self._orig_mod, broken, args, kwargs)
        self.forward = exported
        return original(self, *args, **kwargs)

    vars(call)["fxsched"] = True
    OptimizedModule.__call__ = call  # type: ignore[method-assign]


def innermost(backend: Any) -> Any:
    """The backend that Dynamo, torch.compile or others wrapped."""
    for name in ("_torchdynamo_orig_backend", "__wrapped__", "compiler_fn"):
        if (inner := getattr(backend, name, None)) is not None:
            return innermost(inner)
    return backend


def _refuse_modes(module: OptimizedModule) -> None:
    """Raises a PlanError if a TorchDispatchMode of the user is active around the call
    of a model of ours: Dynamo compiles nothing under a TorchDispatchMode."""
    stack = _get_current_dispatch_mode_stack()
    modes = [mode for mode in stack if getattr(mode, "_mode_key", None) is None]
    backend = innermost(module.dynamo_ctx.callback)
    if modes and isinstance(getattr(backend, "request", None), Request):
        name = type(modes[-1]).__name__.lstrip("_")
        raise PlanError(
            f"{name} is active around the call of the compiled model, but a "
            "TorchDispatchMode can't see what workers compute: call the compiled model "
            "outside of it, or the model itself inside"
        )
