"""Which way a model is captured: by Dynamo, or, where that breaks, by torch.export."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from .capture.graph_breaks import GraphBreak
from .capture.structure import Structure
from .capture.traces import Traces
from .jobs.job import PlanError

if TYPE_CHECKING:
    from .backend import Backend


class Route:
    """Calls a model by Dynamo's graph of it, or, once that breaks, torch.export's.

    compiled: what torch.compile made of the model.
    captured_by: "Dynamo", or "torch.export" and why, or "" before the first call.
    """

    def __init__(
        self, model: Callable[..., Any], backend: Backend, compiled: Callable[..., Any]
    ) -> None:
        self.model, self.backend, self.compiled = model, backend, compiled
        self.captured_by = ""
        self._traces: Traces | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._traces is None:
            try:
                result = self.compiled(*args, **kwargs)
                self.captured_by = "Dynamo"
                return result
            except GraphBreak as broken:
                if not isinstance(self.model, nn.Module):
                    raise
                self._traces = self._export(self.model, broken, args, kwargs)
        call = Structure((args, kwargs))
        graph = self._traces.graph_of(call)
        inputs = graph.inputs(call.tensors)
        return graph.results(inputs, self.backend.run(graph.gm, inputs))

    def _export(
        self, model: nn.Module, broken: GraphBreak, args: Any, kwargs: Any
    ) -> Traces:
        """The traces of a model that Dynamo can't trace, with that of this call."""
        request = self.backend.request
        cut = request.schedule.microbatches > 1
        traces = Traces(model, request.batch_dims if cut else None, _say)
        try:
            traces.graph_of(Structure((args, kwargs)))
        except PlanError as error:
            error.args = (f"{error}\nDynamo breaks its graph at {broken.line}",)
            raise error from None
        self.captured_by = f"torch.export: Dynamo's graph breaks at {broken.line}"
        _say(f"captured by {self.captured_by}")
        return traces


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"fxsched: {text}", file=sys.stderr, flush=True)
