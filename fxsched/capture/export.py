"""Models by torch.export, where Dynamo's graph breaks; no other file imports that.

Non-strict: the model's own Python runs once, on fake tensors. What comes out is told in
Dynamo's convention (see dynamo.py), so that all that follows is the same.
"""

from __future__ import annotations

import hashlib
import operator
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind

from ..ir.graphs import REGION_ENTERS, REGION_EXITS
from ..ir.lazy import lazy_module
from ..jobs.job import PlanError
from .caller import Argument, Call, parts
from .graph_inputs import origin_of, placeholders, symbol_of
from .origins import Origin
from .python_state import Change, PythonState
from .returns import Returned
from .spoken import Spoken
from .structure import Structure
from .whole_batches import Pin, WholeBatches

ROOT = "model"  # what the model is called inside of what is exported
GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled
AUTOCAST = torch.ops.higher_order.wrap_with_autocast
LIBRARY = os.path.dirname(os.__file__)
FOREIGN = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
VALUES = (
    "it decides by values of a tensor, which only a run has: write it with "
    "torch.where or a mask, or decide outside of the model and pass a Python value"
)
HINTS = {"DataDependent": VALUES, "data-dependent": VALUES, "unbacked": VALUES}
CALLED_AGAIN = re.compile(r"@\d+")


class ExportedGraph(NamedTuple):
    """A model's graph, as Dynamo would hand it over.

    gm: the graph; its inputs are `state`, then those of the call at `used`.
    state: parameters, buffers and other tensors of the model, the tensors themselves.
    used: which tensors of the call the graph reads.
    result: what the model returns, without its tensors.
    sources: for each tensor of the result: of the call's tensors or the state that it
        is, the position in all of the graph's inputs; or None, for the next output of
        the graph.
    guards: what tracing took to be true of sizes.
    changes: what the model wrote into itself, which was undone.
    """

    gm: fx.GraphModule
    state: tuple[Tensor, ...]
    used: tuple[int, ...]
    result: Structure
    sources: tuple[int | None, ...]
    guards: tuple[Pin, ...]
    changes: Sequence[Change]

    def inputs(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """What the graph takes, of a call's tensors."""
        return (*self.state, *(tensors[i] for i in self.used))

    def results(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """What the model returns, of what the graph took and gave."""
        rest = iter(outputs)
        values = [next(rest) if i is None else inputs[i] for i in self.sources]
        return self.result.with_tensors(values)

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
        return all(map(partial(_holds, sizes=sizes), self.guards))


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
    return _Teller(program, model, call, named).told(called.note)


class _Teller:
    """Tells torch.export's graph in Dynamo's convention."""

    def __init__(
        self,
        program: ExportedProgram,
        model: nn.Module,
        call: Structure,
        named: Call,
    ) -> None:
        self.program, self.model, self.call, self.named = program, model, call, named
        self.graph, self.root = fx.Graph(), dict[str, Any]()
        self.new: dict[fx.Node, Any] = {}
        self.state: list[Tensor] = []
        self.used: list[int] = []
        self.gradients = torch.is_grad_enabled()

    def told(self, note: _Note) -> ExportedGraph:
        self._inputs()
        outputs = self._body(self.program.graph_module, {})
        returned = [each for each in outputs if not _is_input(each)]
        self.graph.output(tuple(returned))
        for node in reversed(list(self.graph.nodes)):
            if not node.users and _needless(node):
                self.graph.erase_node(node)
        gm = lazy_module(self.root, self.graph)
        positions = {node: i for i, node in enumerate(placeholders(gm))}
        result = note.result
        sources = tuple(positions.get(each) for each in outputs)
        labels = [
            _label(name)
            for name, each in zip(result.names, outputs, strict=True)
            if not _is_input(each)
        ]
        gm.meta["call"] = self.named._replace(tensors=())
        gm.meta["returns"] = tuple(map(Returned, labels))
        gm.meta["text"] = self._text(gm)
        result = result.without_tensors()
        state, used = tuple(self.state), tuple(self.used)
        return ExportedGraph(
            gm, state, used, result, sources, _guards(gm, note.pins), note.changes
        )

    def _text(self, gm: fx.GraphModule) -> str:
        """What tells this graph from others."""
        origins = [str(origin_of(node)) for node in placeholders(gm)]
        constants = [f"{name} {id(value)}" for name, value in self.root.items()]
        text = [str(gm.graph), *origins, *constants, str(gm.meta["returns"])]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()

    def _inputs(self) -> None:
        """The inputs that are read: first the state, then those of the call."""
        nodes = placeholders(self.program.graph_module)
        specs = self.program.graph_signature.input_specs
        users = iter(range(len(self.call.tensors)))
        inputs = []
        for node, spec in zip(nodes, specs, strict=True):
            position = next(users) if spec.kind is InputKind.USER_INPUT else None
            inputs.append((node, spec, position))
        registered = _registry(self.model)
        for node, spec, position in inputs:
            if node.users and position is None:
                self._state(node, str(spec.target), registered)
        for node, _, position in inputs:
            if node.users and position is not None:
                self._argument(node, position, registered)

    def _state(self, node: fx.Node, target: str, registered: Mapping[int, str]) -> None:
        """A parameter, buffer or attribute, or a constant in the model's code."""
        path = target.removeprefix(f"{ROOT}.")
        tensor = _attribute(self.model, path)
        if tensor is None:
            tensor, path = self.program.constants[target], node.name
        name = registered.get(id(tensor))
        origin = Origin(name or f"self.{path}", False, registered=name is not None)
        self.state.append(tensor)
        self._input(node, origin, ())

    def _argument(
        self, node: fx.Node, position: int, registered: Mapping[int, str]
    ) -> None:
        tensor = self.call.tensors[position]
        names = tuple(each for each, value in self.named.tensors if value is tensor)
        state = registered.get(id(tensor))
        name = state or (names[0].name if names else self.call.names[position])
        origin = Origin(name, state is None, registered=state is not None)
        self.used.append(position)
        self._input(node, origin, names)

    def _input(
        self, node: fx.Node, origin: Origin, arguments: tuple[Argument, ...]
    ) -> None:
        new = self.new[node] = self.graph.placeholder(node.name)
        self._note(node, new)
        new.meta.update(origin=origin, arguments=arguments)

    def _note(self, node: fx.Node, new: fx.Node) -> None:
        """What Dynamo notes of a node."""
        new.meta = {
            "example_value": node.meta.get("val"),
            "stack_trace": node.meta.get("stack_trace"),
            "module": _module_of(node),
        }

    def _body(
        self, gm: fx.GraphModule, inputs: Mapping[fx.Node, Any]
    ) -> tuple[Any, ...]:
        """Tells the nodes of a graph; gives what it returns."""
        self.new.update(inputs)
        for node in gm.graph.nodes:
            if node in self.new or node.op == "placeholder":
                continue
            if node.op == "output":
                returned: Any = fx.map_arg(node.args[0], self.new.__getitem__)
                return tuple(returned)
            if node.op == "get_attr":
                self._constant(gm, node)
            elif node.target in (GRADIENTS, AUTOCAST):
                self._region(gm, node)
            elif node.target is operator.getitem and isinstance(
                self.new.get(node.args[0]), tuple
            ):
                self.new[node] = self.new[node.args[0]][node.args[1]]
            else:
                self._call(node)
        raise AssertionError("a graph without an output")

    def _constant(self, gm: fx.GraphModule, node: fx.Node) -> None:
        value = operator.attrgetter(str(node.target))(gm)
        if isinstance(value, fx.GraphModule):  # a region's, told where it is called
            return
        name = f"constant_{len(self.root)}"
        self.root[name] = value
        self.new[node] = self.graph.get_attr(name)
        self._note(node, self.new[node])

    def _call(self, node: fx.Node) -> None:
        spoken = Spoken(node)
        args = fx.map_arg(tuple(spoken.args), self.new.__getitem__)
        kwargs = fx.map_arg(dict(spoken.kwargs), self.new.__getitem__)
        new = self.graph.create_node(spoken.op, spoken.target, args, kwargs)
        self._note(node, new)
        self.new[node] = new

    def _region(self, gm: fx.GraphModule, node: fx.Node) -> None:
        """A region of autocast or without gradients, between its enter and exit.

        before: y = wrap_with_set_grad_enabled(False, body, x)[0]
        after:  _set_grad_enabled(False); y = mul(x, 2); _set_grad_enabled(True)
        """
        at = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node))
        body, settings = node.args[at], node.args[:at]
        assert isinstance(body, fx.Node)
        inner = operator.attrgetter(str(body.target))(gm)
        before = self.gradients
        if node.target is GRADIENTS:
            self.gradients = bool(settings[0])
            self._mark(node, torch._C._set_grad_enabled, settings)
        else:
            enter = torch.amp.autocast_mode._enter_autocast
            entered = self._mark(node, enter, settings)
        values = fx.map_arg(node.args[at + 1 :], self.new.__getitem__)
        self.new[node] = self._body(
            inner, dict(zip(placeholders(inner), values, strict=True))
        )
        if node.target is GRADIENTS:
            self.gradients = before
            self._mark(node, torch._C._set_grad_enabled, (before,))
        else:
            self._mark(node, torch.amp.autocast_mode._exit_autocast, (entered,))

    def _mark(self, node: fx.Node, target: Callable[..., Any], args: Any) -> fx.Node:
        new = self.graph.call_function(target, tuple(args))
        new.meta = {
            "example_value": None,
            "stack_trace": node.meta.get("stack_trace"),
            "module": _module_of(node),
        }
        return new


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


def _guards(gm: fx.GraphModule, pins: Sequence[Pin]) -> tuple[Pin, ...]:
    """What was asked of symbolic sizes while the graph was traced, and its answer."""
    values = [node.meta["example_value"] for node in placeholders(gm)]
    for value in values:
        environment = value.fake_mode.shape_env
        known = environment.replacements
        asked = [Pin(guard.expr, True) for guard in environment.guards]
        return tuple(Pin(e.size.xreplace(known), e.value) for e in (*asked, *pins))
    return ()


def _holds(guard: Pin, sizes: Mapping[Any, int]) -> bool:
    return str(guard.size.xreplace(sizes)) == str(guard.value)  # sympy's, or Python's


def _needless(node: fx.Node) -> bool:
    """Whether a node that nobody reads does nothing: a row of a batch that stayed
    whole, a check of values (microbatches have others), what only such read."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        return node.target not in (*REGION_ENTERS, *REGION_EXITS)
    if node.target._schema.name.removeprefix("aten::").startswith("_assert"):
        return True
    tags = node.target.tags
    return not (
        node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in tags
    )


def _is_input(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "placeholder"


def _attribute(model: nn.Module, path: str) -> Tensor | None:
    """The tensor at a path in a model; None for what is none."""
    try:
        value = operator.attrgetter(path)(model)
    except AttributeError:
        return None
    return value if isinstance(value, Tensor) else None


def _registry(model: nn.Module) -> dict[int, str]:
    """The first name of each parameter and buffer, by its id."""
    names: dict[int, str] = {}
    for each in (nn.Module.named_parameters, nn.Module.named_buffers):
        for name, tensor in each(model, remove_duplicate=False):
            names.setdefault(id(tensor), name)
    return names


def not_exported(error: Exception) -> PlanError:
    """The error for a line of the model that can't be traced either."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not _foreign(each.filename)]
    where = "".join(traceback.format_list((own or list(frames))[-1:])).strip()
    why = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
    what = next(
        (hint for word, hint in HINTS.items() if word in f"{why} {error}"),
        "write that line with torch operations, or move it out of the model",
    )
    return PlanError(
        f"the model can't be traced; torch.export stops at\n  {where}\n  ({why})\n"
        f"{what}"
    )


def _foreign(file: str) -> bool:
    """Whether a file is of torch, Python's library or fxsched's tracing."""
    installed = "site-packages" in file or "dist-packages" in file
    return file.startswith(FOREIGN) or (file.startswith(LIBRARY) and not installed)


def _module_of(node: fx.Node) -> str:
    """The dotted name of the innermost module that a node was called in, or ''."""
    stack: Mapping[str, tuple[Any, ...]] = node.meta.get("nn_module_stack") or {}
    for path, *_ in reversed(list(stack.values())):
        name = CALLED_AGAIN.sub("", str(path))
        if name == ROOT or name.startswith(f"{ROOT}."):
            return name.removeprefix(ROOT).removeprefix(".")
    return ""


def _label(name: str) -> int | str:
    """['logits'] as logits, [0] as 0: how backend(outputs=) names it."""
    keys = parts(name)
    if len(keys) == 1 and keys[0].isdecimal():
        return int(keys[0])
    return ".".join(keys) if keys else 0
