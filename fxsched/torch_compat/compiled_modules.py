"""What torch.compile's modules do where Dynamo breaks the model.

Only torch.compile's module knows the model, and all of a call; Dynamo itself sees a
frame, which it can't return from. So this stands around the module's call: at a break,
before which nothing of the model has run, it becomes what the backend makes of the
model. Dynamo looks through such modules, and never traces it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import OptimizedModule
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..jobs.job import PlanError
from .patched import replace_once
from .tracebacks import shortened


def export_broken(broken: type[Exception], is_own: Callable[[Any], bool]) -> None:
    """Makes modules of backends that are our own go on by backend.exported(), once
    Dynamo breaks them with such an error."""

    def backend_of(module: OptimizedModule) -> Any:
        backend = innermost(module.dynamo_ctx.callback)
        return backend if is_own(backend) else None

    def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if torch._C._len_torch_dispatch_stack() and backend_of(self):
                _refuse_modes()
            try:
                return original(self, *args, **kwargs)
            except broken as error:  # a backend by name is made in the call
                found, backend = error, backend_of(self)
            if backend is None:
                raise found
            self.forward = backend.exported(self._orig_mod, found, args, kwargs)
            return original(self, *args, **kwargs)
        except PlanError as error:
            raise shortened(error)  # noqa: B904

    replace_once((OptimizedModule,), "__call__", call)


def innermost(backend: Any) -> Any:
    """The backend that Dynamo, torch.compile or others wrapped."""
    for name in ("_torchdynamo_orig_backend", "__wrapped__", "compiler_fn"):
        if (inner := getattr(backend, name, None)) is not None:
            return innermost(inner)
    return backend


def active_modes() -> list[Any]:
    """The TorchDispatchModes that are active, PyTorch's own too."""
    return list(_get_current_dispatch_mode_stack())


def _refuse_modes() -> None:
    """Raises a PlanError if a TorchDispatchMode of the user is active: Dynamo compiles
    nothing under one."""
    modes = [
        mode for mode in active_modes() if getattr(mode, "_mode_key", None) is None
    ]
    if modes:
        name = type(modes[-1]).__name__.lstrip("_")
        raise PlanError(
            f"{name} is active around the call of the compiled model, but a "
            "TorchDispatchMode can't see what workers compute: call the compiled model "
            "outside of it, or the model itself inside"
        )
