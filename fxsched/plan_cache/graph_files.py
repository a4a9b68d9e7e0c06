"""Graphs and what passes know of them, as JSON, and back.

A value of JSON's own, and a dict by strings, stands for itself; all else is a list that
begins with its kind: ["t", 1, 2] is a tuple. Long texts, records of fxsched's, graphs
and modules stand once, in a table to which ["#", place] points. names.py says what may
be named.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from math import isfinite
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode

from ..ir.garbage import no_collection
from ..ir.graphs import Spec
from ..ir.lazy import lazy_module
from ..ir.meta import KEYS, SPENT
from ..jobs.job import Piece
from ..jobs.schedule import Schedule
from . import names
from .names import CannotKeep
from .recorded_callbacks import RecordedCallback

FORMAT = 1
LONG = 24  # characters
LEFT = KEYS - set(SPENT)  # of node.meta
LISTS: dict[type, str] = {
    **{tuple: "t", list: "l", set: "set", frozenset: "frozenset"},
    **{torch.Size: "size", fx.immutable_collections.immutable_list: "l"},
}
DICTS = (dict, fx.immutable_collections.immutable_dict)
PLAIN = (str, int, bool, type(None))
PARTS = (fx.GraphModule, Tensor)  # what a graph's module has of its own


def packed(value: Any, shapes: bool = False) -> str:
    """Graphs, modules of them, and plain values around them, as text. Functions of a
    schedule that is listened to are left out, see `unpacked`.

    shapes: whether inputs of graphs keep their fake values, which compilers read.
    Raises CannotKeep for what would not be the same in another process.
    """
    with no_collection():
        packer = _Packer(shapes)
        root = packer.value(value)
        body = {"format": FORMAT, "table": packer.table, "value": root}
        return json.dumps(body, separators=(",", ":"))


def unpacked(text: str, functions: Mapping[tuple[int, str], Any]) -> Any:
    """What was packed, with these functions of schedules in the places of those that
    were left out, by the schedule's number and their name.

    Raises CannotKeep for what fxsched didn't write.
    """
    with no_collection():
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise CannotKeep(f"format {body['format']}")
        return _Unpacker(body["table"], functions).value(body["value"])


class _Packer:
    def __init__(self, shapes: bool) -> None:
        self.inputs = LEFT | {"val"} if shapes else LEFT
        self.table: list[Any] = []
        self.places: dict[int, int] = {}  # in the table, by id
        self.texts: dict[str, int] = {}
        self.kept: list[Any] = []  # so that ids stay theirs
        self.indices: dict[int, dict[fx.Node, int]] = {}  # by the graph's place

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind is str and len(value) > LONG:
            return ["#", self.text(value)]
        if kind in PLAIN:
            return value
        if kind is float:
            return value if isfinite(value) else ["float", repr(value)]
        if kind in LISTS:
            return [LISTS[kind], *map(self.value, value)]
        if kind in DICTS and all(type(key) is str for key in value):
            return {key: self.value(each) for key, each in value.items()}
        if kind in DICTS:
            items = [self.value(each) for item in value.items() for each in item]
            return ["d", *items]
        if isinstance(value, fx.Node):
            place = self.place(value.graph)
            return ["n", place, self.indices[place][value]]
        if id(value) in self.places:
            return ["#", self.places[id(value)]]
        return self.other(value)

    def text(self, value: str) -> int:
        """The place of a long text in the table, which has it once."""
        if value not in self.texts:
            self.texts[value] = len(self.table)
            self.table.append(["text", value])
        return self.texts[value]

    def place(self, value: Any) -> int:
        """The place of a graph in the table."""
        if id(value) not in self.places:
            self.graph(value)
        return self.places[id(value)]

    def enter(self, value: Any, entry: Any) -> list[Any]:
        """Adds something to the table."""
        self.kept.append(value)
        self.places[id(value)] = len(self.table)
        self.table.append(entry)
        return ["#", len(self.table) - 1]

    def other(self, value: Any) -> Any:
        if isinstance(value, RecordedCallback):
            return ["asked", value.schedule, value.name]
        if isinstance(value, fx.GraphModule):
            inside = {name: _inside(value, name) for name in _attributes(value.graph)}
            place = self.place(value.graph)
            known = self.value(inside), self.value(dict(value.meta))
            name = type(value).__name__
            name = name if name.isidentifier() else "GraphModule"  # as of a lambda
            return self.enter(value, ["module", place, name, *known])
        if isinstance(value, fx.Graph):
            return ["#", self.place(value)]
        if isinstance(value, Piece):
            own = value.stage, value.shard, value.number
            return ["piece", int(value), *own]
        if type(value) is Tensor and value.is_cpu and not value.requires_grad:
            return self.enter(value, _constant(value))
        if isinstance(value, bytes):
            return ["bytes", b64encode(value).decode()]
        if isinstance(value, slice):
            return ["slice", *map(self.value, (value.start, value.stop, value.step))]
        if isinstance(value, FakeTensor):
            return ["fake", self.value(Spec.of(value)), value.requires_grad]
        if isinstance(value, FakeTensorMode):
            return None
        if isinstance(value, nx.DiGraph):
            parts = value.nodes(data=True), value.edges(data=True)
            flat = [[self.value(v) for each in part for v in each] for part in parts]
            return ["stages", *flat]
        if isinstance(value, names.TORCH):
            return ["torch", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, Enum):
            return ["enum", names.class_name(type(value)), value.name]
        if isinstance(value, torch._ops.OpOverload):
            return self.enter(value, ["op", names.operation_name(value)])
        if isinstance(value, torch._ops.HigherOrderOperator):
            return ["higher", str(value)]
        for name in ("w", "n"):  # where none is given
            if value is getattr(Schedule, name):
                return ["default", name]
        if isinstance(value, type):
            return ["class", names.class_name(value)]
        if type(value).__module__.startswith("fxsched."):
            return self.data(value)
        if callable(value):
            return self.enter(value, ["f", names.function_name(value)])
        raise CannotKeep(f"a value of the class {type(value).__name__}")

    def data(self, value: Any) -> Any:
        kind: Any = type(value)
        name = names.class_name(kind)
        if isinstance(value, tuple):
            return self.enter(value, ["tuple", name, *map(self.value, value)])
        return self.enter(value, ["data", name, self.value(vars(value))])

    def graph(self, graph: fx.Graph) -> None:
        """Its nodes first, without arguments; these may be nodes."""
        if type(graph._codegen) is not fx.graph.CodeGen:
            raise CannotKeep("a graph that writes its own code")
        nodes = list(graph.nodes)
        made = [[n.op, self.value(n.target), n.name] for n in nodes]
        _, place = self.enter(graph, ["graph", made])
        index = self.indices[place] = {node: i for i, node in enumerate(nodes)}
        rest = []
        for node in nodes:
            left = self.inputs if node.op == "placeholder" else LEFT
            known = {key: node.meta[key] for key in node.meta.keys() & left}
            users = [index[user] for user in node.users] if len(node.users) > 1 else []
            own = map(self.value, (node.args, dict(node.kwargs), known))
            rest.append([*own, users])
        self.table.append(["link", place, rest])


class _Unpacker:
    def __init__(
        self, table: Sequence[Any], functions: Mapping[tuple[int, str], Any]
    ) -> None:
        self.functions = functions
        self.made: list[Any] = []
        self.nodes: dict[int, list[fx.Node]] = {}
        self.kinds: dict[str, Callable[..., Any]] = {
            "n": lambda place, index: self.nodes[place][index],
            "t": lambda *each: tuple(map(self.value, each)),
            "l": lambda *each: list(map(self.value, each)),
            "d": self.dict,
            "set": lambda *each: set(map(self.value, each)),
            "frozenset": lambda *each: frozenset(map(self.value, each)),
            "size": lambda *each: torch.Size(each),
            "float": float,
            "bytes": b64decode,
            "asked": lambda number, name: self.functions[number, name],
            "piece": Piece,
            "slice": lambda *each: slice(*map(self.value, each)),
            "fake": lambda spec, trained: _fake(self.value(spec), trained),
            "stages": self.stages,
            "torch": names.torch_value,
            "device": torch.device,
            "enum": names.member_of,
            "higher": names.higher_order,
            "default": {"w": Schedule.w, "n": Schedule.n}.__getitem__,
            "class": names.class_of,
        }
        entries: dict[str, Callable[..., Any]] = {
            "module": self.module,
            "graph": self.graph,
            "link": self.link,
            "text": str,
            "tensor": _tensor,
            "op": names.operation_of,
            "f": names.function_of,
            "tuple": self.tuple,
            "data": self.data,
        }
        for kind, *rest in table:
            self.made.append(entries[kind](*rest))

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind is list:
            if value[0] == "#":
                return self.made[value[1]]
            return self.kinds[value[0]](*value[1:])
        if kind is dict:
            return {key: self.value(each) for key, each in value.items()}
        return value

    def dict(self, *items: Any) -> dict[Any, Any]:
        each = list(map(self.value, items))
        return dict(zip(each[::2], each[1::2], strict=True))

    def stages(self, nodes: Sequence[Any], edges: Sequence[Any]) -> nx.DiGraph[int]:
        stages: nx.DiGraph[int] = nx.DiGraph()
        each, ends = list(map(self.value, nodes)), list(map(self.value, edges))
        stages.add_nodes_from(zip(each[::2], each[1::2], strict=True))
        stages.add_edges_from(zip(ends[::3], ends[1::3], ends[2::3], strict=True))
        return stages

    def tuple(self, name: str, *values: Any) -> Any:
        kind = names.class_of(name)
        return kind._make(map(self.value, values))  # type: ignore[attr-defined]

    def data(self, name: str, fields: Any) -> Any:
        made: Any = object.__new__(names.class_of(name))
        vars(made).update(self.value(fields))
        return made

    def module(self, place: int, name: str, inside: Any, known: Any) -> fx.GraphModule:
        parts = {names.dotted(key): each for key, each in self.value(inside).items()}
        if missing := _attributes(self.made[place]).keys() - parts.keys():
            raise CannotKeep(f"the attribute {min(missing)}")
        if not all(isinstance(each, PARTS) for each in parts.values()):
            raise CannotKeep("a part that is neither a graph nor a tensor")
        module = lazy_module(parts, self.made[place], names.dotted(name))
        module.meta.update(self.value(known))
        return module

    def graph(self, nodes: Sequence[Any]) -> fx.Graph:
        graph = fx.Graph()
        for op, target, name in nodes:
            if op == "call_method":  # could be of anything
                raise CannotKeep(f"the method {target}")
            own = self.value(target)
            (names.check_target if op == "call_function" else names.dotted)(own)
            if graph.create_node(op, own, name=name).name != name:
                raise CannotKeep(f"a node named {name}")
        self.nodes[len(self.made)] = list(graph.nodes)
        return graph

    def link(self, place: int, rest: Sequence[Any]) -> None:
        """Gives the nodes of a graph their arguments, and what is known of them."""
        nodes = self.nodes[place]
        for node, (args, kwargs, known, _) in zip(nodes, rest, strict=True):
            node.args = self.value(args)
            if kwargs:
                named = self.value(kwargs)
                node.kwargs = {names.dotted(key): each for key, each in named.items()}
            node.meta.update(self.value(known))
        for node, (_, _, _, users) in zip(nodes, rest, strict=True):
            if users:
                node.users.clear()
                node.users.update((nodes[i], None) for i in users)


def _attributes(graph: fx.Graph) -> dict[str, None]:
    """The names of what a graph has of its own."""
    nodes = (n for n in graph.nodes if n.op in ("call_module", "get_attr"))
    return dict.fromkeys(str(node.target) for node in nodes)


def _inside(module: fx.GraphModule, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _constant(tensor: Tensor) -> list[Any]:
    """A tensor that a graph has of its own."""
    if tensor.layout is not torch.strided:
        raise CannotKeep("a constant that isn't dense")
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    kind = str(tensor.dtype).removeprefix("torch.")
    return ["tensor", kind, list(tensor.shape), b64encode(raw).decode()]


def _tensor(kind: str, shape: Sequence[int], data: str) -> Tensor:
    raw = torch.frombuffer(
        bytearray(b64decode(data)) or bytearray(1), dtype=torch.uint8
    )
    values = raw if data else raw[:0]
    return values.view(names.torch_value(kind)).reshape(tuple(shape))


@cache
def _mode() -> FakeTensorMode:
    return FakeTensorMode()


def _fake(spec: Spec, trained: bool) -> Tensor:
    with _mode():
        return spec.empty().requires_grad_(trained)
