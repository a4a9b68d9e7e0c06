"""torch.export's graphs in Dynamo's convention; see dynamo.py.

Inputs that are read come first, and know where they come from; see exported_nodes.py
for the rest.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from .caller import Call, parts
from .early_writes import take_early_writes
from .exported_graph import ExportedGraph
from .exported_nodes import ROOT, Nodes
from .graph_inputs import origin_of, placeholders
from .origins import Origin
from .picked_rows import pick_rows
from .returns import Returned
from .structure import Structure
from .whole_batches import Pin, Returns


class Exported(NamedTuple):
    """What torch.export made of a model, and what was seen meanwhile.

    targets: for each input, the path of a tensor of the model or the name of a
        constant; None for a tensor of the call.
    constants: tensors in the model's code, by their names. paths: how it writes them.
    result: what the model returned. returns: what the graph gives of it.
    pins: sizes that this trace is for.
    """

    gm: fx.GraphModule
    targets: Sequence[str | None]
    constants: Mapping[str, Any]
    paths: Mapping[str, str | None]
    result: Structure
    returns: Returns
    pins: Sequence[Pin]


class Translator:
    """Makes Dynamo's kind of graph of torch.export's."""

    def __init__(
        self,
        exported: Exported,
        model: nn.Module,
        call: Structure,
        named: Call,
    ) -> None:
        self.exported, self.model, self.call, self.named = exported, model, call, named
        self.nodes = Nodes()
        self.state: list[Tensor] = []
        self.used: list[int] = []

    def graph(self) -> ExportedGraph:
        self._inputs()
        outputs = self.nodes.body(self.exported.gm)
        returned = [each for each in outputs if not _is_input(each)]
        gm = self.nodes.module(tuple(returned))
        positions = {node: i for i, node in enumerate(placeholders(gm))}
        result, returns = self.exported.result, self.exported.returns
        sources = tuple(positions.get(each) for each in outputs)
        labels = [
            _label(name)
            for name, each in zip(returns.names, outputs, strict=True)
            if not _is_input(each)
        ]
        gm.meta["call"] = self.named._replace(tensors=())
        gm.meta["returns"] = tuple(map(Returned, labels))
        gm = pick_rows(take_early_writes(gm))
        gm.meta["text"] = self._text(gm)
        result = result.without_tensors()
        state, used = tuple(self.state), tuple(self.used)
        guards = _guards(gm, self.exported.pins)
        places = tuple(returns.places)
        return ExportedGraph(gm, state, used, result, sources, places, guards)

    def _text(self, gm: fx.GraphModule) -> str:
        """What tells this graph from others."""
        origins = [str(origin_of(node)) for node in placeholders(gm)]
        constants = [f"{name} {id(value)}" for name, value in self.nodes.root.items()]
        text = [str(gm.graph), *origins, *constants, str(gm.meta["returns"])]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()

    def _inputs(self) -> None:
        """The inputs that are read: first the state, then those of the call."""
        nodes, targets = placeholders(self.exported.gm), self.exported.targets
        registered = _registry(self.model)
        position = 0
        arguments = []
        for node, target in zip(nodes, targets, strict=True):
            if target is None:
                arguments.append((node, position))
                position += 1
            elif node.users:
                self._state(node, target, registered)
        for node, position in arguments:
            if node.users:
                self._argument(node, position, registered)

    def _state(self, node: fx.Node, target: str, registered: Mapping[int, str]) -> None:
        """A parameter, buffer or attribute, or a constant in the model's code."""
        path = target.removeprefix(f"{ROOT}.")
        tensor = _attribute(self.model, path)
        if tensor is None:
            tensor, path = self.exported.constants[target], node.name
        name = registered.get(id(tensor))
        written = name or self.exported.paths.get(target) or f"self.{path}"
        origin = Origin(written, False, registered=name is not None)
        self.state.append(tensor)
        self.nodes.input(node, origin=origin, arguments=())

    def _argument(
        self, node: fx.Node, position: int, registered: Mapping[int, str]
    ) -> None:
        tensor = self.call.tensors[position]
        names = tuple(each for each, value in self.named.tensors if value is tensor)
        state = registered.get(id(tensor))
        name = state or (names[0].name if names else self.call.names[position])
        origin = Origin(name, state is None, registered=state is not None)
        self.used.append(position)
        self.nodes.input(node, origin=origin, arguments=names)


def _guards(gm: fx.GraphModule, pins: Sequence[Pin]) -> tuple[Pin, ...]:
    """What was asked of symbolic sizes while the graph was traced, and its answer."""
    values = [node.meta["example_value"] for node in placeholders(gm)]
    for value in values:
        environment = value.fake_mode.shape_env
        known = environment.replacements
        asked = [Pin(guard.expr, True) for guard in environment.guards]
        return tuple(Pin(e.size.xreplace(known), e.value) for e in (*asked, *pins))
    return ()


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


def _label(name: str) -> int | str:
    """['logits'] as logits, [0] as 0: how backend(outputs=) names it."""
    keys = parts(name)
    if len(keys) == 1 and keys[0].isdecimal():
        return int(keys[0])
    return ".".join(keys) if keys else 0
