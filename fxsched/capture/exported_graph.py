"""A graph that torch.export makes of a model, and how a call of the model goes by it.

No other file imports torch.export. Non-strict: the model's own Python runs once, on
fake tensors.

It becomes what Dynamo hands over, see dynamo.py: only inputs that are read are there,
the state first, and know where they come from; nodes know the modules that they were
called in. lowered.py does the rest.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export

from ..ir.graphs import storage
from ..ir.meta import note, of_node
from ..jobs.job import PlanError
from ..torch_compat.ctc_losses import ctc_traced
from ..torch_compat.own_gradients import own_gradients
from .caller import Argument, Call, Structure, parts
from .global_guards import GlobalGuards, first_frames
from .graph_breaks import not_exported
from .graph_inputs import Origin, placeholders, registry, symbol_of
from .lowered import aten_graph
from .noted_values import Change, Noted, noted_model
from .refusals import refuse_generators
from .returns import Returned, label_of
from .torch_calls import (
    Pin,
    Place,
    Returns,
    TorchCalls,
    refuse_gradients,
    refuse_seeding,
)


class ModelRun:
    """Runs a model for a call, (args, kwargs), with others in the place of its tensors.

    result: what it returned. returns: what the graph is to give of it.
    changes: what it wrote into itself and around it, which was undone.
    guards: of what it read around it. calls: what it called of torch.
    """

    result: Structure
    returns: Returns
    changes: Sequence[Change] = ()

    def __init__(self, model: nn.Module, call: Structure) -> None:
        self.model, self.call = model, call
        self.before = Noted()
        self.guards, self.calls = GlobalGuards(), TorchCalls()

    def __call__(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        args, kwargs = self.call.with_tensors(tensors)
        self.before = noted_model({"self": self.model})
        try:
            with (
                own_gradients(refuse_gradients),
                self.calls,
                first_frames(self._look),
            ):
                result = self.result = Structure(self.model(*args, **kwargs))
            self.returns = self.calls.returned(result.tensors, result.names)
        finally:
            self.changes = [*self.before.changes(), *self.guards.changes()]
            self.guards.settle()
            for change in reversed(self.changes):
                change.undo()
        return tuple(self.returns.values)

    def _look(self, frame: FrameType) -> None:
        self.guards.look(frame)
        refuse_seeding(frame)

    def path_of(self, weight: nn.Parameter) -> str | None:
        """How the model writes a weight that it doesn't register."""
        for path, module in self.guards.modules.items():
            for name, each in module.named_parameters(path):
                if each is weight:
                    return name
        return self.before.path_of(weight) or self.guards.path_of(weight)


ROOT = "model"  # what the model is called inside of what is exported
CALLED_AGAIN = re.compile(r"@\d+")


class ExportedGraph(NamedTuple):
    """A model's graph, as Dynamo would hand it over.

    gm: the graph; its inputs are `state`, then those of the call at `used`.
    state: parameters, buffers and other tensors of the model, the tensors themselves.
    used: which tensors of the call the graph reads.
    result: what the model returns, without its tensors.
    sources: for each value that is given: of the call's tensors or the state that it
        is, the position in all of the graph's inputs; or None, for the next output of
        the graph.
    places: for each tensor of the result, which of these it is, or a row of.
    guards: what tracing took to be true of sizes.
    """

    gm: fx.GraphModule
    state: tuple[Tensor, ...]
    used: tuple[int, ...]
    result: Structure
    sources: tuple[int | None, ...]
    places: Sequence[Place]
    guards: Sequence[Pin]

    def inputs(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """What the graph takes, of a call's tensors."""
        return (*self.state, *(tensors[i] for i in self.used))

    def results(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """What the model returns, of what the graph took and gave."""
        rest = iter(outputs)
        values = [next(rest) if i is None else inputs[i] for i in self.sources]
        apart = {p.value for p in self.places if p.row is not None}
        rows = {i: values[i].unbind(0) for i in apart}
        tensors = [
            values[p.value] if p.row is None else rows[p.value][p.row]
            for p in self.places
        ]
        return self.result.with_tensors(tensors)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a call's tensors have sizes that this graph is for."""
        sizes: dict[Any, int] = {}
        inputs = placeholders(self.gm)[len(self.state) :]
        for node, i in zip(inputs, self.used, strict=True):
            known = node.meta["example_value"].shape
            if len(known) != tensors[i].dim():
                return False
            for size, actual in zip(known, tensors[i].shape, strict=True):
                symbol = symbol_of(size)
                wanted = size if symbol is None else sizes.setdefault(symbol, actual)
                if wanted != actual:
                    return False
        # sympy's numbers and truths, or Python's
        return all(str(g.size.xreplace(sizes)) == str(g.value) for g in self.guards)


def exported_graph(program: Any, run: ModelRun, named: Call) -> ExportedGraph:
    """What torch.export made of a model's run, in Dynamo's form.

    program: the ExportedProgram. named: the call, as the user names what is in it.
    """
    gm: fx.GraphModule = program.graph_module
    for each in gm.modules():  # bodies too
        for node in each.graph.nodes if isinstance(each, fx.GraphModule) else ():
            node.meta["example_value"] = of_node(node).get("val")
            of_node(node)["module"] = _module_of(node)
    refuse_generators(gm)
    state, used = _take_inputs(gm, program, run, named)
    results: Any = gm.graph.output_node().args[0]
    inputs = placeholders(gm)
    sources = [inputs.index(each) if each in inputs else None for each in results]
    own = [i for i, source in enumerate(sources) if source is None]
    gm.graph.output_node().args = (tuple(results[i] for i in own),)
    paths = [parts(run.returns.names[i]) for i in own]
    labels = [label_of([int(k) if k.isdecimal() else k for k in p]) for p in paths]
    gm.meta["call"] = named._replace(tensors=())
    gm.meta["returns"] = tuple(map(Returned, labels))
    gm = aten_graph(gm)
    result, places = run.result.without_tensors(), run.returns.places
    guards = _guards(gm, run.calls.pins)
    return ExportedGraph(gm, state, used, result, tuple(sources), places, guards)


def _take_inputs(
    gm: fx.GraphModule, program: Any, run: ModelRun, named: Call
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Says where inputs come from, and erases those that are not read; gives the state
    that is, and the positions of the call's tensors."""
    registered, state, used = registry(run.model), list[Tensor](), list[int]()
    positions = count()
    specs = program.graph_signature.input_specs
    for node, spec in zip(placeholders(gm), specs, strict=True):
        position = next(positions) if spec.target is None else None
        if not node.users:
            gm.graph.erase_node(node)
            continue
        names: tuple[Argument, ...] = ()
        if position is None:
            tensor, written = _state(node, spec.target, program, run)
            state.append(tensor)
        else:
            tensor = run.call.tensors[position]
            names = tuple(each for each, value in named.tensors if value is tensor)
            written = names[0].name if names else run.call.names[position]
            used.append(position)
        name = registered.get(id(tensor))
        argument = position is not None and name is None
        origin = Origin(name or written, argument, registered=name is not None)
        note(node, origin=origin, arguments=names)
    return tuple(state), tuple(used)


def _state(
    node: fx.Node, target: str, program: Any, run: ModelRun
) -> tuple[Tensor, str]:
    """A parameter, buffer or attribute, a weight that the model doesn't register, or a
    constant in its code; and how it writes it."""
    path = target.removeprefix(f"{ROOT}.")
    with suppress(AttributeError):
        value = attrgetter(path)(run.model)
        if isinstance(value, Tensor):
            return value, f"self.{path}"
    constant: Tensor = program.constants[target]
    weight = run.calls.weights.get(storage(constant))
    if weight is None:
        return constant, f"self.{node.name}"
    mode = of_node(node)["val"].fake_mode
    node.meta["example_value"] = mode.from_tensor(weight, static_shapes=True)
    return weight, run.path_of(weight) or f"self.{node.name}"


def _module_of(node: fx.Node) -> str:
    """The dotted name of the innermost module that a node was called in, or ''."""
    stack: Mapping[str, tuple[Any, ...]] = node.meta.get("nn_module_stack") or {}
    for path, *_ in reversed(list(stack.values())):
        name = CALLED_AGAIN.sub("", str(path))
        if name == ROOT or name.startswith(f"{ROOT}."):
            return name.removeprefix(ROOT).removeprefix(".")
    return ""


def _guards(gm: fx.GraphModule, pins: Sequence[Pin]) -> list[Pin]:
    """What was asked of symbolic sizes while the graph was traced, and its answer."""
    inputs = placeholders(gm)
    if not inputs:
        return []
    environment = inputs[0].meta["example_value"].fake_mode.shape_env
    asked = [*(Pin(guard.expr, True) for guard in environment.guards), *pins]
    return [Pin(e.size.xreplace(environment.replacements), e.value) for e in asked]


class _Stopped(Exception):
    """The model raised: torch.export prints the whole graph that it gives an error.

    made: where sizes that the error is about, and values say, were made.
    """

    def __init__(self, error: Exception, tensors: Sequence[Any]) -> None:
        super().__init__()
        self.error = error
        environment = tensors[0].fake_mode.shape_env if tensors else None
        stacks = getattr(environment, "var_to_stack", {})  # to say more, if it is there
        symbols = getattr(getattr(error, "cond", None), "free_symbols", ())
        self.made = [stacks[s].summary() for s in symbols if s in stacks]

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
            raise _Stopped(error, tensors) from error


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
    tensors, made = tuple(called.run.call.tensors), []
    try:
        with warnings.catch_warnings(), _kept_attributes(called), ctc_traced():
            # changes are seen by ModelRun, and RNNs write what they restore
            warnings.filterwarnings("ignore", "The tensor attribute")
            return export(called, tensors, dynamic_shapes=(dynamic,), strict=False)
    except _Stopped as stopped:
        error, made = stopped.error, stopped.made
    except Exception as raised:
        error = raised
    if isinstance(error, PlanError):
        raise error
    raise not_exported(error, made) from error


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
