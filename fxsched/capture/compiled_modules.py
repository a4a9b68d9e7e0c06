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
        if torch._C._len_torch_dispatch_stack() and _backend_of(self):
            _refuse_modes()
        try:
            return original(self, *args, **kwargs)
        except GraphBreak as error:
            broken, backend = error, _backend_of(self)
        if backend is None:
            raise broken
        self.forward = backend.exported(self._orig_mod, broken, args, kwargs)
        return original(self, *args, **kwargs)

    vars(call)["fxsched"] = True
    OptimizedModule.__call__ = call  # type: ignore[method-assign]


def _backend_of(module: OptimizedModule) -> Any:
    """A compiled module's backend, if it is one of ours."""
    backend = innermost(module.dynamo_ctx.callback)
    return backend if isinstance(getattr(backend, "request", None), Request) else None


def innermost(backend: Any) -> Any:
    """The backend that Dynamo, torch.compile or others wrapped."""
    for name in ("_torchdynamo_orig_backend", "__wrapped__", "compiler_fn"):
        if (inner := getattr(backend, name, None)) is not None:
            return innermost(inner)
    return backend


def _refuse_modes() -> None:
    """Raises a PlanError if a TorchDispatchMode of the user is active: Dynamo compiles
    nothing under one."""
    stack = _get_current_dispatch_mode_stack()
    modes = [mode for mode in stack if getattr(mode, "_mode_key", None) is None]
    if modes:
        name = type(modes[-1]).__name__.lstrip("_")
        raise PlanError(
            f"{name} is active around the call of the compiled model, but a "
            "TorchDispatchMode can't see what workers compute: call the compiled model "
            "outside of it, or the model itself inside"
        )
