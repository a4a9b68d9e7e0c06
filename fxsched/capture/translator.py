"""torch.export's graphs as Dynamo hands them over; see dynamo.py.

Only inputs that are read are there, the state first, and know where they come from;
nodes know the modules that they were called in. lowered.py does the rest.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from .caller import Call, parts
from .exported_graph import ExportedGraph
from .graph_inputs import origin_of, placeholders, text_of
from .lowered import aten_graph
from .origins import Origin
from .returns import Returned
from .structure import Structure
from .whole_batches import Pin, Returns

ROOT = "model"  # what the model is called inside of what is exported
CALLED_AGAIN = re.compile(r"@\d+")


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
        self.state: list[Tensor] = []
        self.used: list[int] = []

    def graph(self) -> ExportedGraph:
        exported, gm = self.exported, self.exported.gm
        self._inputs()
        _note_nodes(gm)
        outputs: Any = gm.graph.output_node().args[0]
        returned = [not _is_input(each) for each in outputs]
        labels = [
            _label(name)
            for name, own in zip(exported.returns.names, returned, strict=True)
            if own
        ]
        names = [node.name for node in placeholders(gm)]
        sources = tuple(
            None if own else names.index(each.name)
            for each, own in zip(outputs, returned, strict=True)
        )
        gm.graph.output_node().args = (
            tuple(each for each, own in zip(outputs, returned, strict=True) if own),
        )
        gm.meta["call"] = self.named._replace(tensors=())
        gm.meta["returns"] = tuple(map(Returned, labels))
        gm = aten_graph(gm)
        gm.meta["text"] = text_of(gm, [str(origin_of(n)) for n in placeholders(gm)])
        guards = _guards(gm, exported.pins)
        return ExportedGraph(
            gm,
            tuple(self.state),
            tuple(self.used),
            exported.result.without_tensors(),
            sources,
            tuple(exported.returns.places),
            guards,
        )

    def _inputs(self) -> None:
        """Says where inputs come from, which are the state's first, and erases those
        that are not read."""
        nodes, targets = placeholders(self.exported.gm), self.exported.targets
        registered = _registry(self.model)
        positions = count()
        for node, target in zip(nodes, targets, strict=True):
            position = next(positions) if target is None else None
            if not node.users:
                self.exported.gm.graph.erase_node(node)
            elif position is None:
                self._state(node, str(target), registered)
            else:
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
        node.meta.update(origin=origin, arguments=())

    def _argument(
        self, node: fx.Node, position: int, registered: Mapping[int, str]
    ) -> None:
        tensor = self.call.tensors[position]
        names = tuple(each for each, value in self.named.tensors if value is tensor)
        state = registered.get(id(tensor))
        name = state or (names[0].name if names else self.call.names[position])
        origin = Origin(name, state is None, registered=state is not None)
        self.used.append(position)
        node.meta.update(origin=origin, arguments=names)


def _note_nodes(gm: fx.GraphModule) -> None:
    """Writes down what Dynamo notes of nodes, those of bodies too."""
    for each in gm.modules():
        for node in each.graph.nodes if isinstance(each, fx.GraphModule) else ():
            node.meta["example_value"] = node.meta.get("val")
            node.meta["module"] = _module_of(node)


def _module_of(node: fx.Node) -> str:
    """The dotted name of the innermost module that a node was called in, or ''."""
    stack: Mapping[str, tuple[Any, ...]] = node.meta.get("nn_module_stack") or {}
    for path, *_ in reversed(list(stack.values())):
        name = CALLED_AGAIN.sub("", str(path))
        if name == ROOT or name.startswith(f"{ROOT}."):
            return name.removeprefix(ROOT).removeprefix(".")
    return ""


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
