"""Models by torch.export, where Dynamo's graph breaks; no other file imports that.

Non-strict: the model's own Python runs once, on fake tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from ..jobs.job import PlanError
from .caller import Call
from .ctc import ctc_traced
from .exported_graph import ROOT, ExportedGraph, exported_graph
from .graph_breaks import not_exported
from .model_run import ModelRun


class _Stopped(Exception):
    """The model raised: torch.export prints the whole graph that it gives an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __setattr__(self, name: str, value: object) -> None:
        if name != "partial_fx_graph":
            super().__setattr__(name, value)


class _Called(nn.Module):
    """The model as a function of the tensors of a call alone."""

    def __init__(self, run: ModelRun) -> None:
        super().__init__()
        self.add_module(ROOT, run.model)
        self.training, self.run = run.model.training, run

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        try:
            return self.run(tensors)
        except Exception as error:
            raise _Stopped(error) from error


def export_model(
    run: ModelRun, named: Call, dims: Sequence[Sequence[int]]
) -> ExportedGraph:
    """The graph of a model for a call.

    named: the call, as the user names what is in it.
    dims: for each of its tensors, the dimensions whose sizes may be others in later
        calls.
    Raises PlanError, with the user's line, for what cannot be traced.
    """
    dynamic = tuple(dict.fromkeys(each, Dim.AUTO) for each in dims)
    return exported_graph(_traced(_Called(run), dynamic), run, named)


def _traced(called: _Called, dynamic: Any) -> ExportedProgram:
    tensors = tuple(called.run.call.tensors)
    try:
        with warnings.catch_warnings(), _kept_attributes(called), ctc_traced():
            # changes are seen by ModelRun, and RNNs write what they restore
            warnings.filterwarnings("ignore", "The tensor attribute")
            return export(called, tensors, dynamic_shapes=(dynamic,), strict=False)
    except _Stopped as stopped:
        error = stopped.error
    except Exception as raised:
        error = raised
    if isinstance(error, PlanError):
        raise error
    raise not_exported(error) from error


@contextmanager
def _kept_attributes(model: nn.Module) -> Iterator[None]:
    """torch.export leaves copies in the place of lists and dicts that modules hold."""
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for now, before in attributes:
            for name, value in before.items():
                if now.get(name) is not value:
                    now[name] = value
