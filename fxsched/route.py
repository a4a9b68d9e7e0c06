"""Models that Dynamo breaks, called by torch.export's graphs of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import fx, nn

from .capture.batch import fixed_size, no_tensors
from .capture.caller import Structure
from .capture.graph_breaks import FixedBatch, GraphBreak
from .capture.traces import Traces
from .ir.request import Request
from .jobs.job import PlanError


class Runs(Protocol):
    """Plans and runs graphs: a Backend."""

    request: Request

    def run(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> Sequence[Any]: ...

    def tracing(self) -> AbstractContextManager[None]: ...


class Route:
    """Calls a model as torch.export traces it; with a new kind of call, once more.

    captured_by: what says so, and why.
    """

    def __init__(self, model: nn.Module, backend: Runs, broken: GraphBreak) -> None:
        request = backend.request
        self.backend, self.broken = backend, broken
        self.traces = Traces(model, request, _say)
        self.captured_by = f"torch.export: Dynamo's graph breaks at {broken.line}"

    def trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Traces the call at which Dynamo broke, and says so.

        Raises PlanError, with both lines, for what neither can trace.
        """
        call = Structure((args, kwargs))
        microbatches = self.backend.request.schedule.microbatches
        if not call.tensors and microbatches > 1:
            raise no_tensors(microbatches)
        try:
            with self.backend.tracing():
                graph = self.traces.graph_of(call)
        except PlanError as error:
            error.args = (self._also(str(error)),)
            raise
        inputs = graph.inputs(call.tensors)
        fixed = fixed_size(graph.gm, inputs, self.backend.request)
        if fixed is not None and isinstance(self.broken, FixedBatch):
            raise PlanError(self.broken.text)  # Dynamo knows the model's line
        if fixed is not None:
            raise PlanError(self._also(fixed.text))
        _say(f"captured by {self.captured_by}")

    def _also(self, text: str) -> str:
        line = self.broken.line
        if not line.startswith("("):
            return f"{text}\nDynamo breaks its graph at {line}"
        return (
            f"{text}\nDynamo breaks its graph too {line}; torch.compile(model, "
            "backend='eager', fullgraph=True) shows where"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = Structure((args, kwargs))
        with self.backend.tracing():
            graph = self.traces.graph_of(call)
        inputs = graph.inputs(call.tensors)
        try:
            return graph.results(inputs, self.backend.run(graph.gm, inputs))
        except GraphBreak as error:  # which no other way is left for
            raise PlanError(error.text) from error


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"fxsched: {text}", file=sys.stderr, flush=True)
