"""What fxsched knows about fx graphs: shapes of values, roles of inputs, aliases.

Passes hand each other what they find out of a node in node.meta, whose keys are listed
in meta.py, and of the whole graph in its facts (facts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from . import ops

REPLICATED = "replicated"  # in a node's meta, and in the meta that torch hands on
REGION_ENTERS = (
    torch.amp.autocast_mode._enter_autocast,
    torch._C._set_grad_enabled,
)
REGION_EXITS = (torch.amp.autocast_mode._exit_autocast,)


class Role(Enum):
    """What an input of the traced graph is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"  # cut into microbatches along dimension 0
    SHARED = "shared"  # the same for every microbatch


class Spec(NamedTuple):
    """Shape, strides, type and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> Spec:
        """The spec of a tensor."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return Spec(shape, stride, tensor.dtype, tensor.device)

    def empty(self, device: str | None = None) -> Tensor:
        """A new tensor like this, its contents undefined; or like it elsewhere."""
        return torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=device or self.device
        )

    def run(self, elements: int) -> Spec:
        """The spec of so many of its elements, as a 1-d tensor."""
        return self._replace(shape=(elements,), stride=(1,))

    @property
    def bytes(self) -> int:
        """Bytes of its elements, each once."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}[{', '.join(map(str, self.shape))}]"


def same_strides(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of a tensor with its strides, in memory of its own, without a history."""
    plain, dtype = tensor.detach(), dtype or tensor.dtype
    if tensor.layout is not torch.strided:
        return plain.to(dtype, copy=True)
    ends = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in ends)
    memory = plain.as_strided((span * bool(tensor.numel()),), (1,))
    return memory.to(dtype, copy=True).as_strided(tensor.shape, tensor.stride())


Specs = tuple[Spec, ...]  # of a value: one for a tensor, any number for a bundle


def in_type(specs: Specs, dtype: torch.dtype | None) -> Specs:
    """Shapes of gradients in the type that they are added up in; None for their own."""
    if dtype is None:
        return specs
    return tuple(spec._replace(dtype=dtype) for spec in specs)


class Output(NamedTuple):
    """How an output of the model is put together from those of its microbatches.

    kind: "rows" (joined along `dim`), "scalar" (the loss), "folded" (to their `how`:
        mean, sum, max or min), "one" (the last one's, which are all the same unless
        `how` is "last"), "whole" (there is one microbatch), "state" (what input number
        `state` is after the last of them), "given" (that input), or "constant"
        (`constant` itself).
    name: its index or key in what the user gets.
    differentiable: whether a gradient may come back for it.
    replaced: whether the model has it in the place of the state, not written into it.
    joint: whether it is made once, for the whole batch.
    kept: whether only the model gets it, written into the state.
    leaves: the inputs of the call that a gradient for it reaches; None for all.
    """

    kind: str
    dim: int | None = None
    constant: Any = None
    differentiable: bool = False
    state: int | None = None
    replaced: bool = False
    name: int | str | None = None
    how: str | None = None
    joint: bool = False
    kept: bool = False
    leaves: frozenset[int] | None = None

    @property
    def takes_gradient(self) -> bool:
        """Whether B can start from it; no one kept which microbatch gave a maximum."""
        return self.differentiable and self.how not in ("max", "min")


class State(NamedTuple):
    """A parameter, buffer or shared input: its position in the call, what it is, and
    the user's name for it, which nothing is looked up by."""

    input: int
    role: Role
    name: str


class Group(NamedTuple):
    """Tensors of the model's state with the same owners and the same readers.

    state: parameters, buffers and shared inputs.
    owners: workers that keep them, in increasing order.
    stages: stages that read them.
    trained: for each of them, whether it gets a gradient.
    givers: stages that give gradients.
    written: whether F writes into them.
    updater: the worker that updates them, if u says.
    """

    state: tuple[State, ...]
    owners: tuple[int, ...]
    stages: tuple[int, ...]
    trained: tuple[bool, ...]
    givers: tuple[int, ...] = ()
    written: bool = False
    updater: int | None = None

    @property
    def updaters(self) -> tuple[int, ...]:
        """The workers that update them."""
        return self.owners if self.updater is None else (self.updater,)

    @property
    def unawaited(self) -> set[int]:
        """Stages that read them and give no gradient, for which no update waits."""
        return {*self.stages} - {*self.givers} if any(self.trained) else set()

    @property
    def learned(self) -> list[State]:
        """Those that get gradients."""
        pairs = zip(self.state, self.trained, strict=True)
        return [state for state, trained in pairs if trained]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its parameters or buffers."""
        return tuple(each.name for each in self.state)


def result(gm: fx.GraphModule) -> Any:
    """What a graph returns: its output node's argument."""
    return gm.graph.output_node().args[0]


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """A node's arguments, for readers that know what they are."""
    return node.args


def dims(node: fx.Node) -> tuple[int, ...]:
    """Where a batch input has its samples, as ops.rows takes it: () for dimension 0."""
    dim: int = node.meta["dim"]
    return (dim,) if dim else ()


def make(
    graph: fx.Graph,
    target: Callable[..., Any] | str,
    args: tuple[Any, ...],
    specs: Sequence[Spec],
    worker: int,
    task: str,
    n: int,
    name: str | None = None,
) -> fx.Node:
    """A node of a worker's program: what it calls, what it gives, where it belongs."""
    op = "call_module" if isinstance(target, str) else "call_function"
    node = graph.create_node(op, target, args, name=name)
    bundle = target in ops.BUNDLES
    node.meta.update(worker=worker, task=task, n=n, specs=tuple(specs), bundle=bundle)
    return node


def storage(value: Tensor) -> int:
    """A number that tells storages apart; views of one tensor share it."""
    return int(value.untyped_storage()._cdata)


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value that may be a tensor or a sequence."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes, and all that they come of."""
    queue = list(nodes)
    found = set(queue)
    while queue:
        new = set(queue.pop().all_input_nodes) - found
        found |= new
        queue += new
    return found


def written_storages(graph: fx.Graph) -> set[int]:
    """The memory that a traced microbatch writes into."""
    return {storage(t) for n in graph.nodes for t in n.meta.get("mutates", ())}


def touches(node: fx.Node, written: int) -> bool:
    """Whether a traced node reads a storage, or gives a view of it."""
    values = [node.meta["val"], *(n.meta.get("val") for n in node.all_input_nodes)]
    return any(storage(t) == written for value in values for t in tensors(value))


def module_prefixes(node: fx.Node) -> list[str]:
    """a, a.b and a.b.c for a traced node of module a.b.c."""
    parts = str(node.meta["module"]).split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts)) if parts[0]]


def operation_name(target: Any) -> str:
    """What an operation is called: "aten::add", "higher_order::flex_attention"."""
    schema = getattr(target, "_schema", None)
    return str(schema.name) if schema else f"higher_order::{target.name()}"


def name_of(target: Any) -> str:
    """A target's short name: "add_" of aten.add_.Tensor, "getitem" of operator's."""
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", target))


class Call(Protocol):
    """What a node calls, or something else that is described as a node is."""

    @property
    def target(self) -> Any: ...

    @property
    def args(self) -> tuple[Any, ...]: ...

    @property
    def kwargs(self) -> dict[str, Any]: ...


def named_arguments(call: Call) -> dict[str, Any]:
    """What an operation is called with, by the names in its schema, with defaults; that
    of a Python function, by position only."""
    schema = getattr(call.target, "_schema", None)
    if schema is None:
        return {str(i): each for i, each in enumerate(call.args)} | call.kwargs
    known = {each.name: each.default_value for each in schema.arguments}
    return known | dict(zip(known, call.args, strict=False)) | call.kwargs


def is_mutable(target: Any) -> bool:
    """Whether an operation writes into what it is given, by its schema."""
    return bool(getattr(getattr(target, "_schema", None), "is_mutable", False))


def written_arguments(call: Call) -> dict[str, Any]:
    """What an operation writes into, by the names in its schema."""
    if not is_mutable(call.target):
        return {}
    named, schema = named_arguments(call), call.target._schema
    infos = {each.name: each.alias_info for each in schema.arguments}
    into = [name for name, info in infos.items() if info and info.is_write]
    return {name: named[name] for name in into if named[name] is not None}


def draws(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an aten operation draws random numbers; dropout of nothing doesn't."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    arguments = {a.name: a.default_value for a in target._schema.arguments}
    arguments |= dict(zip(arguments, args, strict=False)) | kwargs
    return arguments.get("p") != 0 and arguments.get("dropout_p") != 0


class Draw(NamedTuple):
    """A draw of random numbers: its number in the model, and whether all microbatches
    draw the same."""

    number: int
    replicated: bool


def numbered_draws(nodes: Iterable[fx.Node]) -> dict[fx.Node, tuple[Draw, ...]]:
    """Each node's draws, counted over the model: dropout is the same however the model
    is cut.

    Shards share the numbers of a node, copies for the whole batch those of a replicated
    one.
    """
    drawn: dict[fx.Node, tuple[Draw, ...]] = {}
    named: dict[str, tuple[Draw, ...]] = {}
    count = 0
    for node in nodes:
        replicated = node.meta.get(REPLICATED, False)
        known = named.get(node.meta["key"]) if replicated else None
        known = node.meta.get("draws", known)
        if known is not None:
            drawn[node] = known
            continue
        numbers = range(count, count + node.meta.get("random", 0))
        drawn[node] = tuple(Draw(i, replicated) for i in numbers)
        count += len(numbers)
        if replicated:
            named[node.meta["key"]] = drawn[node]
    return drawn


def is_view(target: Any) -> bool:
    """Whether an aten operation's output may share memory with its first input."""
    aten = torch.ops.aten
    if target in (aten._unsafe_view.default, aten.detach.default):
        return True
    schema = getattr(target, "_schema", None)
    return bool(schema and schema.returns and schema.returns[0].alias_info is not None)


def base(node: fx.Node) -> fx.Node:
    """The node whose memory an aten node's output shares, following views."""
    while node.op == "call_function" and is_view(node.target):
        node = node.all_input_nodes[0]
    return node
