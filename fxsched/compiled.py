"""fxsched.compile: a model by a schedule, whichever way its graph can be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .backend import Backend, backend
from .jobs.schedule import Schedule
from .plans.plan import Plan
from .route import Route


def compile(model: Callable[..., Any], schedule: Schedule, **options: Any) -> Compiled:
    """The model, run by a schedule: called as the model is, it gives what that gives.

    options: those of fxsched.backend.

    torch.compile traces most models. Where Dynamo breaks a model's graph, torch.export
    runs the model's own Python on stand-ins for tensors, and what comes out is planned
    alike: same plan, same gradients. A line on stderr says so, and why.
    What tracing read of the call (shapes, types, Python values) and of the model
    (attributes, train and eval, gradients on or off) is checked at each call; with
    something else there, it is traced and planned again.
    Raises PlanError, with the user's line, for what neither can trace.
    """
    return Compiled(model, backend(schedule, **options))


class Compiled:
    """What fxsched.compile returns; attributes are the model's, but for these.

    backend: the Backend, with its plan, timeline and close().
    captured_by: "Dynamo", "torch.export: " and why, or "" before the first call.
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
        """Ends the backend; see Backend.close."""
        self.backend.close()

    @property
    def captured_by(self) -> str:
        route = getattr(self._compiled, "forward", None)
        if isinstance(route, Route):
            return route.captured_by
        return "Dynamo" if self._called else ""

    @property
    def plan(self) -> Plan | None:
        """The backend's."""
        return self.backend.plan
