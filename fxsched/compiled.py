"""fxsched.compile: runs a model by a schedule, also if Dynamo breaks its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .backend import Backend, backend
from .jobs.schedule import Schedule
from .options import named_in_errors
from .plans.plan import Plan
from .route import Route


def compile(model: Callable[..., Any], schedule: Schedule, **options: Any) -> Compiled:
    """Compiles a model to run by a schedule; call the result as you call the model.

    options: the options of fxsched.backend, as keyword arguments.

    torch.compile traces most models. If Dynamo breaks a model's graph, torch.export
    runs the model's own Python on fake tensors instead. The resulting graph is planned
    in the same way: the plan and the gradients are the same. A line on stderr says so,
    and why.
    Each call checks everything that tracing read: shapes, types and Python values of
    the inputs, and the model's attributes, its training mode, and whether gradients are
    on. If any of these has changed, the model is traced and planned again.
    Raises PlanError, with a line of your code, for a model that neither can trace.
    """
    with named_in_errors("compile"):
        own = backend(schedule, **options)
    return Compiled(model, own)


class Compiled:
    """The model that fxsched.compile returns; other attributes are those of the model.

    backend: the Backend, with its plan, timeline and close().
    captured_by: "Dynamo", or "torch.export: " and the reason; "" before the first call.
    """

    def __init__(self, model: Callable[..., Any], backend: Backend) -> None:
        self.model, self.backend = model, backend
        self._compiled = torch.compile(model, backend=backend)
        self._called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._compiled(*args, **kwargs)
        self._called = True
        return result

    def __getattr__(self, name: str) -> Any:
        if name in ("model", "_compiled"):  # of an object that is not made yet
            raise AttributeError(name)
        return getattr(self.model, name)

    def __enter__(self) -> Compiled:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the backend; see Backend.close."""
        self.backend.close()

    @property
    def captured_by(self) -> str:
        route = getattr(self._compiled, "forward", None)
        if isinstance(route, Route):
            return route.captured_by
        return "Dynamo" if self._called else ""

    @property
    def plan(self) -> Plan | None:
        """The plan of the backend; see Backend."""
        return self.backend.plan
