"""Models by torch.export, where Dynamo's graph breaks; no other file imports that.

Non-strict: the model's own Python runs once, on fake tensors. translator.py makes
Dynamo's kind of graph of what comes out, so that all that follows is the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind

from ..jobs.job import PlanError
from .caller import Call
from .export_errors import not_exported
from .exported_graph import ExportedGraph
from .exported_nodes import ROOT
from .python_state import Change, PythonState
from .structure import Structure
from .translator import Exported, Translator
from .whole_batches import Pin, WholeBatches


class _Note:
    """What the model returned and wrote, where torch.export doesn't look for it."""

    result: Structure
    changes: Sequence[Change] = ()
    pins: Sequence[Pin] = ()


class _Called(nn.Module):
    """The model as a function of the tensors of a call alone."""

    def __init__(self, model: nn.Module, call: Structure) -> None:
        super().__init__()
        self.add_module(ROOT, model)
        self.training = model.training
        self.call, self.note = call, _Note()

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        args, kwargs = self.call.with_tensors(tensors)
        model = getattr(self, ROOT)
        before = PythonState(model)
        try:
            with WholeBatches() as batches:
                result = self.note.result = Structure(model(*args, **kwargs))
            self.note.pins = batches.pins
        finally:
            self.note.changes = before.changes()
            for change in reversed(self.note.changes):
                change.undo()
        return tuple(result.tensors)


def export_model(
    model: nn.Module,
    call: Structure,
    named: Call,
    dims: Sequence[int | None],
) -> ExportedGraph:
    """The model's graph for a call, (args, kwargs).

    named: the same call, as the user names what is in it.
    dims: for each tensor of the call, the dimension with its samples, whose size may
        be another in later calls.
    Raises PlanError, with the user's line, for what cannot be traced.
    """
    called = _Called(model, call)
    dynamic = tuple({} if dim is None else {dim: Dim.AUTO} for dim in dims)
    try:
        with warnings.catch_warnings(), _kept_attributes(model):
            # PythonState sees what a forward writes, and RNNs write what they restore
            warnings.filterwarnings("ignore", "The tensor attribute")
            program = export(
                called, tuple(call.tensors), dynamic_shapes=(dynamic,), strict=False
            )
    except PlanError:
        raise
    except Exception as error:
        raise not_exported(error) from error
    return Translator(_exported(program, called.note), model, call, named).graph()


def _exported(program: ExportedProgram, note: _Note) -> Exported:
    targets = [
        None if spec.kind is InputKind.USER_INPUT else str(spec.target)
        for spec in program.graph_signature.input_specs
    ]
    gm, constants = program.graph_module, program.constants
    return Exported(gm, targets, constants, note.result, note.changes, note.pins)


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
