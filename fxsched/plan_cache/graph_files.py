"""Graphs and what passes know of them, as bytes, and back.

Python's own pickle writes a graph module as its code, without what passes know of its
nodes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode

from ..ir.garbage import no_collection
from ..ir.graphs import Spec, name_of
from ..ir.lazy import lazy_module
from ..ir.meta import META, SPENT
from ..jobs.schedule import Schedule
from .recorded_callbacks import RecordedCallback

LEFT = META.keys() - set(SPENT)  # of node.meta
READ: WeakKeyDictionary[fx.Graph, list[fx.Node]] = WeakKeyDictionary()  # their nodes


class CannotKeep(Exception):
    """Says what of a plan can't be written or compared."""


def packed(value: Any, shapes: bool = False) -> bytes:
    """Graphs, modules of them, and plain values around them, as bytes. Functions of a
    schedule that is listened to are left out, see `unpacked`.

    shapes: whether inputs of graphs keep their fake values, which compilers read.
    Raises CannotKeep for what would not be the same in another process.
    """
    file = io.BytesIO()
    try:
        with no_collection():
            _Packer(file, shapes).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError, NotImplementedError) as e:
        raise CannotKeep(str(e)) from e
    return file.getvalue()


def unpacked(data: bytes, functions: Mapping[tuple[int, str], Any]) -> Any:
    """What was packed, with these functions of schedules in the places of those that
    were left out, by the schedule's number and their name."""
    with no_collection():
        return _Unpacker(io.BytesIO(data), functions).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shapes: bool) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.inputs = LEFT | {"val"} if shapes else LEFT
        self.indices: dict[fx.Graph, dict[fx.Node, int]] = {}

    def persistent_id(self, obj: Any) -> tuple[int, str] | None:
        return (obj.schedule, obj.name) if isinstance(obj, RecordedCallback) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, fx.Node):
            return _node, (obj.graph, self._index(obj.graph)[obj])
        if isinstance(obj, fx.Graph):
            return self._graph(obj)
        if isinstance(obj, fx.GraphModule):
            inside = {name: _inside(obj, name) for name in _attributes(obj.graph)}
            name = type(obj).__name__
            return _module, (obj.graph, name, inside), obj.meta, None, None, _know
        if isinstance(obj, torch._ops.OpOverload):
            if name_of(obj).startswith("chosen_rows"):
                raise CannotKeep(f"{obj}, which reads what its trace left")
            return _overload, (obj._schema.name, obj._overloadname)
        if isinstance(obj, torch._ops.HigherOrderOperator):
            return _higher_order, (str(obj),)
        if isinstance(obj, FakeTensor):
            return _fake, (Spec.of(obj), obj.requires_grad)
        if isinstance(obj, FakeTensorMode):
            return type(None), ()
        if obj is torch._C._set_grad_enabled:
            return getattr, (torch._C, "_set_grad_enabled")
        for name in ("w", "n"):  # where none is given
            if obj is getattr(Schedule, name):
                return getattr, (Schedule, name)
        return NotImplemented

    def _index(self, graph: fx.Graph) -> dict[fx.Node, int]:
        if graph not in self.indices:
            self.indices[graph] = {node: i for i, node in enumerate(graph.nodes)}
        return self.indices[graph]

    def _graph(self, graph: fx.Graph) -> Any:
        """Its nodes first, without arguments; these may be nodes."""
        if type(graph._codegen) is not fx.graph.CodeGen:
            raise CannotKeep("a graph that writes its own code")
        index = self._index(graph)
        nodes = [(n.op, n.target, n.name) for n in graph.nodes]
        rest = []
        for node in graph.nodes:
            left = self.inputs if node.op == "placeholder" else LEFT
            known = {key: node.meta[key] for key in node.meta.keys() & left}
            users = [index[user] for user in node.users]
            rest.append((node.args, dict(node.kwargs), known, users))
        return _graph, (nodes,), rest, None, None, _link


class _Unpacker(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, functions: Mapping[tuple[int, str], Any]
    ) -> None:
        super().__init__(file)
        self.functions = functions

    def persistent_load(self, pid: Any) -> Any:
        return self.functions[pid]


def _attributes(graph: fx.Graph) -> dict[str, None]:
    """The names of what a graph has of its own."""
    nodes = (n for n in graph.nodes if n.op in ("call_module", "get_attr"))
    return dict.fromkeys(str(node.target) for node in nodes)


def _inside(module: fx.GraphModule, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _graph(nodes: Sequence[tuple[str, Any, str]]) -> fx.Graph:
    graph = fx.Graph()
    for op, target, name in nodes:
        made = graph.create_node(op, target, name=name)
        if made.name != name:
            raise CannotKeep(f"a node named {name}")
    READ[graph] = list(graph.nodes)
    return graph


def _link(graph: fx.Graph, rest: Sequence[tuple[Any, ...]]) -> None:
    """Gives the nodes of a graph their arguments, and what is known of them."""
    nodes = READ[graph]
    for node, (args, kwargs, known, _) in zip(nodes, rest, strict=True):
        node.args, node.kwargs = args, kwargs
        node.meta.update(known)
    for node, (_, _, _, users) in zip(nodes, rest, strict=True):
        if len(users) > 1:
            node.users.clear()
            node.users.update((nodes[i], None) for i in users)


def _node(graph: fx.Graph, index: int) -> fx.Node:
    return READ[graph][index]


def _module(graph: fx.Graph, name: str, inside: dict[str, Any]) -> fx.GraphModule:
    return lazy_module(inside, graph, name)


def _know(module: fx.GraphModule, known: dict[str, Any]) -> None:
    module.meta.update(known)


@cache
def _mode() -> FakeTensorMode:
    return FakeTensorMode()


def _fake(spec: Spec, trained: bool) -> Tensor:
    with _mode():
        return spec.empty().requires_grad_(trained)


def _overload(name: str, overload: str) -> Callable[..., Any]:
    space, _, operation = name.partition("::")
    packet = getattr(getattr(torch.ops, space), operation)
    found: Callable[..., Any] = getattr(packet, overload or "default")
    return found


def _higher_order(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(torch.ops.higher_order, name)
    return found
