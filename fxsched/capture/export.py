"""Models by torch.export, where Dynamo's graph breaks; no other file imports that.

Non-strict: the model's own Python runs once, on fake tensors. translator.py makes
Dynamo's kind of graph of what comes out, so that all that follows is the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind

from ..jobs.job import PlanError
from .caller import Call
from .ctc import ctc_traced
from .drawn_numbers import refuse_seeding
from .export_errors import not_exported
from .exported_graph import ExportedGraph
from .noted_values import Change
from .outside_names import OutsideNames, first_frames
from .outside_tensors import OutsideTensors
from .own_gradients import refuse_own_gradients, shown_functions
from .python_state import PythonState
from .structure import Structure
from .translator import ROOT, Exported, Translator
from .whole_batches import Pin, Returns, WholeBatches


class Export(NamedTuple):
    """A model's graph, and what its Python did meanwhile.

    changes: what it wrote into itself and around it, which was undone.
    outside: what it read around it.
    """

    graph: ExportedGraph
    changes: Sequence[Change]
    outside: OutsideNames


class _Note:
    """What the model returned and wrote, where torch.export doesn't look for it."""

    result: Structure
    changes: Sequence[Change] = ()
    model: PythonState
    outside: OutsideNames
    pins: Sequence[Pin] = ()
    returns: Returns
    unknown: Iterable[nn.Parameter] = ()

    def path_of(self, weight: nn.Parameter) -> str | None:
        """How the model writes a weight that it doesn't register."""
        for path, module in self.outside.modules.items():
            for name, each in module.named_parameters(path):
                if each is weight:
                    return name
        return self.model.path_of(weight) or self.outside.path_of(weight)


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

    def __init__(
        self, model: nn.Module, call: Structure, outside: Sequence[nn.Parameter]
    ) -> None:
        super().__init__()
        self.outside = {f"outside_{i}": id(p) for i, p in enumerate(outside)}
        for name, parameter in zip(self.outside, outside, strict=True):
            self.register_parameter(name, parameter)
        self.add_module(ROOT, model)
        self.training = model.training
        self.call, self.note = call, _Note()

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        args, kwargs = self.call.with_tensors(tensors)
        model = getattr(self, ROOT)
        before = self.note.model = PythonState(model)
        outside = self.note.outside = OutsideNames()

        def look(frame: FrameType) -> bool:
            outside.look(frame)
            refuse_seeding(frame)
            return refuse_own_gradients(frame)

        known = {key: getattr(self, name) for name, key in self.outside.items()}
        weights = OutsideTensors(known)
        try:
            with weights, WholeBatches() as batches, first_frames(look):
                result = self.note.result = Structure(model(*args, **kwargs))
            self.note.pins, self.note.unknown = batches.pins, weights.unknown.values()
            self.note.returns = batches.returned(result.tensors, result.names)
        except Exception as error:
            raise _Stopped(error) from error
        finally:
            self.note.changes = [*before.changes(), *outside.changes()]
            outside.settle()
            for change in reversed(self.note.changes):
                change.undo()
        return tuple(self.note.returns.values)


def export_model(
    model: nn.Module,
    call: Structure,
    named: Call,
    dims: Sequence[Sequence[int]],
) -> Export:
    """The model's graph for a call, (args, kwargs).

    named: the same call, as the user names what is in it.
    dims: for each tensor of the call, the dimensions whose sizes may be others in later
        calls.
    Raises PlanError, with the user's line, for what cannot be traced.
    """
    dynamic = tuple(dict.fromkeys(each, Dim.AUTO) for each in dims)
    called, program = _traced(_Called(model, call, ()), dynamic)
    weights = list(called.note.unknown)
    if weights:
        called, program = _traced(_Called(model, call, weights), dynamic)
    exported = _exported(program, called.note, weights)
    graph = Translator(exported, model, call, named).graph()
    return Export(graph, called.note.changes, called.note.outside)


def _traced(called: _Called, dynamic: Any) -> tuple[_Called, ExportedProgram]:
    tensors = tuple(called.call.tensors)
    try:
        kept, shown = _kept_attributes(called), shown_functions()
        with warnings.catch_warnings(), kept, shown, ctc_traced():
            # PythonState sees what a forward writes, and RNNs write what they restore
            warnings.filterwarnings("ignore", "The tensor attribute")
            program = export(called, tensors, dynamic_shapes=(dynamic,), strict=False)
        return called, program
    except _Stopped as stopped:
        error = stopped.error
    except Exception as raised:
        error = raised
    if isinstance(error, PlanError):
        raise error
    raise not_exported(error) from error


def _exported(
    program: ExportedProgram, note: _Note, weights: Sequence[nn.Parameter]
) -> Exported:
    targets = [
        None if spec.kind is InputKind.USER_INPUT else str(spec.target)
        for spec in program.graph_signature.input_specs
    ]
    outside = {f"outside_{i}": p for i, p in enumerate(weights)}
    paths = {name: note.path_of(p) for name, p in outside.items()}
    gm, constants = program.graph_module, {**program.constants, **outside}
    given = note.result, note.returns, note.pins
    return Exported(gm, targets, constants, paths, *given)


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
