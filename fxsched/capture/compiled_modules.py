"""What torch.compile makes of a module, where Dynamo breaks the module's graph."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch._dynamo import OptimizedModule

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
