"""Follows values that are cut into parts through the operations of a model.

The rules are those by which rows of a batch are followed (rule_table.py), where every
part is a row: a value is the same for all shards, or each has a part of it along
one dimension, or it is the sum of what they have.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload

from ..ir import joint
from ..ir.facts import facts
from ..ir.graphs import (
    REGION_ENTERS,
    REGION_EXITS,
    Call,
    Role,
    name_of,
    named_arguments,
    storage,
    tensors,
)
from ..ir.meta import of_node
from ..ir.modes import unlogged
from .kinds import REPLICATE, UNKNOWN, Kind, Rows
from .rule_table import parts_of, rule_of
from .tracker import Tracker, Watch

aten = torch.ops.aten
PRODUCTS = (
    *("linear", "conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)
OUTERS = (1, 2, 3)  # blocks along a dimension, as query, key and value in one weight
Layout = tuple[Rows, ...]  # of the tensors in a value
Layouts = Mapping[fx.Node, Layout]
# What opens and closes regions such as autocast's, or leads into the whole batch.
AROUND = (*REGION_ENTERS, *REGION_EXITS, joint.join)
DROPOUT = torch.ops.aten.dropout.default
WORD = "expert"  # how a stack of matrices is cut whose parts are whole matrices


class Each(NamedTuple):
    """An argument that is another one on each shard."""

    every: tuple[Any, ...]

    @staticmethod
    def of(argument: Any, shard: int) -> Any:
        """An argument on a shard."""
        return argument.every[shard] if isinstance(argument, Each) else argument


class Operation(NamedTuple):
    """What a node calls.

    value: what it gives, in fake tensors.
    """

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any

    @staticmethod
    def of(node: fx.Node) -> Operation:
        """That of a node."""
        return Operation(
            node.op, node.target, node.args, node.kwargs, of_node(node).get("val")
        )

    @property
    def reads(self) -> list[fx.Node]:
        """The nodes among its arguments, each once."""
        reads: dict[fx.Node, None] = {}
        fx.map_arg((self.args, self.kwargs), reads.setdefault)
        return list(reads)

    def on(self, reads: Mapping[fx.Node, fx.Node]) -> Operation:
        """The same of other nodes."""
        args, kwargs = fx.map_arg((self.args, self.kwargs), reads.__getitem__)
        return self._replace(args=args, kwargs=kwargs)

    @property
    def bias(self) -> fx.Node | None:
        """What is added to a product, as by a linear layer."""
        if self.target is aten.addmm.default and not self.kwargs:  # beta and alpha
            bias = self.args[0]
        elif name_of(self.target) in PRODUCTS:
            bias = named_arguments(self).get("bias")
        else:
            return None
        return bias if isinstance(bias, fx.Node) else None

    @property
    def bias_shape(self) -> tuple[int, ...] | None:
        """What a bias is viewed as to be added; None if it is added as it is."""
        if "conv" not in str(self.target):
            return None
        return (-1, *[1] * (self.value.dim() - 2))

    @property
    def unbiased(self) -> Operation:
        """The product without its bias."""
        if self.target is aten.addmm.default:
            return self._replace(target=aten.mm.default, args=self.args[1:])
        given = named_arguments(self) | {"bias": None}
        return self._replace(args=tuple(given.values()), kwargs={})

    @property
    def is_item(self) -> bool:
        """Whether it takes a tensor out of a list or tuple."""
        if self.target is not operator.getitem:
            return False
        source = self.args[0]
        return isinstance(source, fx.Node) and not isinstance(value_of(source), Tensor)


class Follower:
    """Runs nodes of a traced graph again, on fake tensors.

    shards: how many parts there are.
    """

    def __init__(self, gm: fx.GraphModule, shards: int) -> None:
        self.shards = shards
        self._mode = facts(gm).fake_mode
        self._interpreter = fx.Interpreter(gm)
        for node in gm.graph.find_nodes(op="get_attr"):
            of_node(node).setdefault("val", self._interpreter.fetch_attr(node.target))

    def layout(self, call: Operation, known: Layouts) -> Layout:
        """What becomes of a call's value, if its operands are laid out so; those that
        aren't among `known` are whole."""
        if call.is_item:
            source, item = call.args
            return (known[source][item],)
        if (
            isinstance(call.target, HigherOrderOperator)
            and rule_of(call.target) is None
        ):
            return (UNKNOWN,) * len(list(tensors(call.value)))
        layout = vocabulary_layout(call, known)
        if layout is not None:
            return layout
        return self.followed(call, known, self.shards)

    def followed(self, call: Operation, known: Layouts, parts: int) -> Layout:
        """The same of as many parts."""
        tracker = _tracker(known, parts)
        args, kwargs = fx.map_arg((call.args, call.kwargs), value_of)
        with torch.no_grad(), self._mode, _uncached(), Watch(tracker):
            out = self._run(call, args, kwargs)
        return tuple(map(tracker.of, tensors(out)))

    def slices(self, call: Operation, known: Layouts) -> dict[fx.Node, Rows] | None:
        """The whole operands that a call on parts reads parts of, if its operation says
        so; None of others."""
        if not isinstance(call.target, (OpOverload, HigherOrderOperator)):
            return None
        tracker = _tracker(known, self.shards)
        args, kwargs = fx.map_arg((call.args, call.kwargs), value_of)
        parts = parts_of(tracker.call(call.target, args, kwargs, call.value))
        if parts is None:
            return None
        dims = {id(tensor): dim for tensor, dim in parts if tensor.shape[dim] > 1}
        return {
            read: Rows(Kind.SHARD, dims[id(value_of(read))])
            for read in call.reads
            if read not in known and id(value_of(read)) in dims
        }

    def part(self, value: Any, layout: Layout) -> Any:
        """A shard's part of a value, as a fake tensor of its own."""
        if not isinstance(value, Tensor):
            parts = zip(tensors(value), layout, strict=True)
            return tuple(self.part(tensor, (rows,)) for tensor, rows in parts)
        with self._mode:
            new = value.new_empty(part_shape(value.shape, layout[0], self.shards))
        return new.requires_grad_(value.requires_grad)

    def value(self, call: Operation) -> Any:
        """What a call gives for the values of what it reads."""
        return self.run(call, *fx.map_arg((call.args, call.kwargs), value_of))

    def run(self, call: Operation, args: Any, kwargs: Any) -> Any:
        """What a call gives for other fake tensors."""
        with self._mode, unlogged():
            return self._run(call, args, kwargs)

    def _run(self, call: Operation, args: Any, kwargs: Any) -> Any:
        with _uncached():
            return getattr(self._interpreter, call.op)(call.target, args, kwargs)


def _tracker(known: Layouts, parts: int) -> Tracker:
    """One that knows how operands are laid out."""
    tracker = Tracker(parts, {})
    for tensor, rows in laid_out(known):
        if rows != REPLICATE:
            tracker.put(tensor, rows)
    return tracker


@contextmanager
def _uncached() -> Iterator[None]:
    """Without the casts of weights that torch.autocast keeps: of what, isn't known."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def is_plain(layout: Layout) -> bool:
    """Whether shards can go on with a value as it is: no parts were mixed, and all that
    was done to them has a rule."""
    kinds = (Kind.REPLICATE, Kind.SHARD, Kind.SUM, Kind.OWN)
    return all(rows.kind in kinds and rows.plain for rows in layout)


def is_part(layout: Layout) -> bool:
    """Whether a shard has a part of a value, along a dimension of it."""
    return any(rows.kind in (Kind.SHARD, Kind.OWN) for rows in layout)


def part_shape(shape: Sequence[int], rows: Rows, shards: int) -> list[int]:
    """The shape of a shard's part."""
    sizes = list(map(int, shape))
    if rows.kind is Kind.SHARD:
        sizes[rows.dim] //= shards
    return sizes


def equal_parts(shape: Sequence[int], shards: int) -> list[Rows]:
    """The ways to cut a value into parts of the same size, in blocks or not."""
    return [
        Rows(Kind.SHARD, dim, outer)
        for dim, size in enumerate(shape)
        for outer in OUTERS
        if size % (outer * shards) == 0
    ]


def laid_out(known: Layouts) -> Iterator[tuple[Tensor, Rows]]:
    """The tensors in values, each with how it is laid out."""
    for read, layout in known.items():
        yield from zip(tensors(value_of(read)), layout, strict=True)


def value_of(node: fx.Node) -> Any:
    """What a node gives, in fake tensors."""
    return of_node(node).get("val")


def where(node: fx.Node) -> str:
    """An operation, and the module that it is in."""
    return f"{name_of(node.target)} in {of_node(node)['module'] or 'the model'}"


def in_flow(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes in their order, but for those that come after what reads them, as totals
    of the whole batch may: these come just before it."""
    ordered: dict[fx.Node, None] = {}
    for last in nodes:
        waiting = [last]
        while waiting:
            node = waiting[-1]
            missing = [n for n in node.all_input_nodes if n not in ordered]
            waiting += missing
            if not missing:
                ordered.setdefault(waiting.pop())
    return list(ordered)


def is_weight(node: fx.Node) -> bool:
    """Whether a node is a parameter of the model."""
    return of_node(node).get("role") is Role.PARAMETER


def matrices(node: fx.Node) -> list[fx.Node]:
    """The parameters of two dimensions or more that a node reads."""
    reads = filter(is_weight, node.all_input_nodes)
    return [weight for weight in reads if value_of(weight).dim() > 1]


def is_stack(node: fx.Node, weight: fx.Node) -> bool:
    """Whether a weight that a node reads is several matrices: of three dimensions, and
    not a convolution's."""
    return value_of(weight).dim() > 2 and "conv" not in str(node.target)


def why_whole(weight: fx.Node, shards: int, reason: str) -> str:
    """Why a weight stays whole, if one that was tried stays so for a reason."""
    experts = int(value_of(weight).shape[0])
    stacked = any(is_stack(node, weight) for node in weight.users)
    if stacked and experts > 1 and experts % shards:
        return f"its {experts} experts don't divide by {shards}"
    return reason


def draws_itself(node: fx.Node) -> bool:
    """Whether a node draws random numbers, unless it is a dropout whose parts can be
    of the same ones."""
    fake = value_of(node)
    dropout = (
        node.target is DROPOUT and isinstance(fake, Tensor) and fake.is_contiguous()
    )
    return bool(of_node(node).get("random")) and not dropout


def writes_operand(node: fx.Node) -> bool:
    """Whether a node writes into what it reads, and not into memory of its own."""
    written = {storage(t) for t in of_node(node).get("mutates", ())}
    return any(
        storage(t) in written
        for read in node.all_input_nodes
        for t in tensors(of_node(read).get("val"))
    )


aten = torch.ops.aten
REDUCTIONS = ("none", "mean", "sum")  # as ATen numbers them
Known = Mapping[fx.Node, tuple[Rows, ...]]


class Lookup(NamedTuple):
    """An embedding: of indices [..] in a weight [rows, width]."""

    indices: fx.Node
    weight: fx.Node
    padding_idx: int | None


class ClassLoss(NamedTuple):
    """A cross entropy: of logits [n, classes, ..] and labels [n, ..], which are numbers
    of classes."""

    logits: fx.Node
    labels: fx.Node
    weight: fx.Node | None
    reduction: str
    ignore_index: int
    label_smoothing: float


def lookup_of(call: Call) -> Lookup | None:
    """The embedding that a call is, if parts of its weight can be read by index."""
    if call.target is not aten.embedding.default:
        return None
    weight, indices, padding, by_count, sparse = named_arguments(call).values()
    if by_count or sparse or not _are_nodes(weight, indices):
        return None
    return Lookup(indices, weight, None if padding < 0 else padding)


def loss_of(call: Call) -> ClassLoss | None:
    """The cross entropy that a call is, if it is one of labels."""
    if call.target is not aten.cross_entropy_loss.default:
        return None
    logits, labels, weight, reduction, *settings = named_arguments(call).values()
    if not _are_nodes(logits, labels):
        return None
    values, numbers = of_node(logits)["val"], of_node(labels)["val"]
    if numbers.is_floating_point() or values.dim() != numbers.dim() + 1:
        return None
    if values.dim() < 2:
        return None
    return ClassLoss(logits, labels, weight, REDUCTIONS[reduction], *settings)


def vocabulary_layout(call: Call, known: Known) -> tuple[Rows, ...] | None:
    """The layout of what a call makes of a vocabulary in parts; None for others.

    A sum of tables' rows, and of losses what others can't go on with as it is.
    """
    lookup = lookup_of(call)
    if lookup is not None and list(known) == [lookup.weight]:
        (rows,) = known[lookup.weight]
        if (rows.kind, rows.dim, rows.outer) == (Kind.SHARD, 0, 1):
            return (Rows(Kind.SUM),)
        if (rows.kind, rows.dim) == (Kind.SHARD, 1):
            return (rows._replace(dim=of_node(lookup.indices)["val"].dim()),)
    loss = loss_of(call)
    parts = {} if loss is None else {loss.logits: (Rows(Kind.SHARD, 1),)}
    return (Rows(Kind.SUM),) if parts and known == parts else None


def _are_nodes(*values: Any) -> bool:
    return all(isinstance(value, fx.Node) for value in values)
