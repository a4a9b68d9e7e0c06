"""A graph that torch.export made of a model, and how a call of the model goes by it.

It becomes what Dynamo hands over, see dynamo.py: only inputs that are read are there,
the state first, and know where they come from; nodes know the modules that they were
called in. lowered.py does the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, fx

from ..ir.graphs import storage
from .caller import Argument, Call, parts
from .graph_inputs import placeholders, symbol_of
from .lowered import aten_graph
from .model_run import ModelRun
from .origins import Origin, registry
from .refusals import refuse_generators
from .returns import Returned, label_of
from .structure import Structure
from .torch_calls import Pin, Place

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
            node.meta["example_value"] = node.meta.get("val")
            node.meta["module"] = _module_of(node)
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
        node.meta.update(origin=origin, arguments=names)
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
    mode = node.meta["val"].fake_mode
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
