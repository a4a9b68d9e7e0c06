"""Follows the rows of a batch through a model, operation by operation.

It sees the aten operations that run while one microbatch is traced, so the rules are
few, and costs no run of its own. What the rules can't tell is UNKNOWN, not a guess:
where rows of microbatches may meet, it counts as if they did.
Sizes that depend on the batch are numbers by then; Dynamo's symbols tell of those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.graphs import (
    is_mutable,
    name_of,
    named_arguments,
    storage,
    tensors,
    written_arguments,
)
from .kinds import (
    REPLICATE,
    UNKNOWN,
    Cause,
    Effect,
    Kind,
    OpCall,
    Rows,
    first_cause,
    meet,
)
from .rule_table import rule_of
from .weighted_loss import label_mean


class Tracker:
    """The rows of every tensor of one trace.

    size: rows of a microbatch.
    symbols: Dynamo's sizes of the batch, each as a multiple of its rows.
    joins: whether microbatches' sizes add up to one of the batch.
    exact: whether rows of different microbatches may meet: then values that keep their
        rows, though others went into them, start anew. `causes` are the operations
        that they meet in, if they do, `met` has the nodes after which rows are apart
        again; `kept` is what microbatches do by themselves all the same; `weighed` are
        nodes in which sums are divided by each other, or added to what is none.
    """

    def __init__(
        self,
        size: int,
        symbols: Mapping[Any, int],
        exact: bool = False,
        joins: Callable[[object], bool] = bool,
    ) -> None:
        self.size, self.symbols, self.exact, self.joins = size, symbols, exact, joins
        self.met: set[fx.Node] = set()
        self.weighed: set[fx.Node] = set()
        self.unlinear: set[fx.Node] = set()  # with a B of the user's, not linear
        self.sized = True  # Dynamo's symbols say of values where they have rows
        self.causes: dict[Cause, None] = {}
        self.kept: Cause | None = None
        self._rows: dict[int, tuple[Tensor, Rows]] = {}
        self._node: fx.Node | None = None

    def put(self, tensor: Tensor, rows: Rows) -> None:
        """Notes the rows of a tensor."""
        self._rows[id(tensor)] = tensor, rows

    def of(self, tensor: Tensor) -> Rows:
        """The rows of a tensor; one that is not known has none."""
        _, rows = self._rows.get(id(tensor), (tensor, REPLICATE))
        return rows

    def enter(self, node: fx.Node) -> None:
        """Says which node of the model's graph the next operations belong to."""
        self._node = node

    def call(self, func: Any, args: Sequence[Any], kwargs: Any, out: Any) -> OpCall:
        """An operation as rules see it."""
        stack = self._node.meta.get("stack_trace") if self._node else None
        whole = not self.symbols  # parts of tensors, not of a batch
        return OpCall(func, tuple(args), kwargs, out, self.of, self.size, stack, whole)

    def see(self, func: Any, args: Sequence[Any], kwargs: Any, out: Any) -> None:
        """Notes the rows of an operation's result."""
        call, rule = self.call(func, args, kwargs, out), rule_of(func)
        into = [] if rule else [*written_arguments(call).values()]
        results = {id(tensor): tensor for tensor in tensors((out, into))}.values()
        if not results:
            return
        shared = all(rows.kind is Kind.REPLICATE for rows in call.values)
        rows = rule(call) if rule else REPLICATE if shared else UNKNOWN
        every = [rows] * len(results) if isinstance(rows, Rows) else rows
        for tensor, each in zip(results, every, strict=True):
            note = self._write if is_mutable(func) else self.put
            note(tensor, each)

    def _write(self, tensor: Tensor, rows: Rows) -> None:
        """Notes the rows of a tensor that was written into, and of its views."""
        before = self.of(tensor)
        if rows.kind is Kind.UNKNOWN:
            rows = rows._replace(cause=rows.cause or self._unsure())
        self.put(tensor, rows)
        plain = rows.kind in (Kind.SHARD, Kind.REPLICATE) and rows.cause is None
        if before == rows and plain:
            return
        for other, old in list(self._rows.values()):
            if other is not tensor and storage(other) == storage(tensor):
                self.put(other, self._both(old, before, rows))

    def _both(self, old: Rows, before: Rows, new: Rows) -> Rows:
        """The rows of a tensor after a part of it, which had others before, got new
        ones."""
        cause = first_cause((old, new))
        if old.sharded and (before.place == new.place or before.reduced):
            return old._replace(cause=old.cause or first_cause((new, before)))
        if cause is None and {old.kind, new.kind} <= {Kind.MEAN, Kind.REPLICATE}:
            return new if old.kind is Kind.REPLICATE else old
        return UNKNOWN._replace(cause=cause or self._unsure())

    def note_write(self, value: Any, views: Sequence[Tensor]) -> None:
        """Notes the rows of what was written by these views: microbatches need not have
        those of the batch's."""
        for rows in map(self.of, views):
            for tensor in tensors(value):
                own = self.of(tensor)
                alike = rows.kind is not Kind.SHARD or own.kind is rows.kind
                if not alike or meet(rows) or rows.kind in UNSURE:
                    cause = rows.cause or own.cause
                    known = own if cause and own.kind is Kind.SHARD else UNKNOWN
                    self.put(tensor, known._replace(cause=cause))

    def note_backward(
        self, node: fx.Node, value: Any, meets: Cause | None, linear: bool
    ) -> None:
        """Notes a node's backward that a user wrote: where rows meet in it, if they do,
        and whether it is linear."""
        if not linear:
            self.unlinear.add(node)
        if meets is None or not self.symbols:
            return
        if self.exact:
            self.causes[meets] = None
            self.met.add(node)
        else:
            for tensor in tensors(value):
                rows = self.of(tensor)
                self.put(tensor, rows._replace(cause=rows.cause or meets))

    def settle(self, node: fx.Node, value: Any) -> None:
        """Corrects the rows of a node's value by what the symbols of its sizes say."""
        factor = self._factor(node)
        examples = list(tensors(node.meta.get("example_value")))
        results = list(tensors(value))
        if len(examples) != len(results):
            return
        for tensor, example in zip(results, examples, strict=True):
            rows = self.of(tensor)
            if factor is not None:
                rows = self.scaled(rows, tensor, factor)
            rows = self._of_loss(node, rows)
            if self.sized:
                rows = self._placed(node, rows, example)
                if self.exact:
                    rows = self._anew(node, rows, example)
            if rows != self.of(tensor):
                self.put(tensor, rows)

    def _anew(self, node: fx.Node, rows: Rows, example: Tensor) -> Rows:
        """The rows of a value that other rows went into, or may have, computed on all
        of them."""
        if rows.kind is Kind.UNKNOWN:
            cause = rows.cause or _cause(Effect.UNSURE, node)
            rows = rows._replace(kind=Kind.OTHER, cause=cause)
        if rows.cause is None:
            return rows
        if "batch_norm" in rows.cause.operation:
            if "once" in node.meta:
                self.causes[rows.cause] = None
            else:
                self.kept = self.kept or rows.cause
            return rows._replace(cause=None)
        self.causes[rows.cause] = None
        self.weighed |= {node} if rows.cause.effect in WEIGHED else set()
        if not self.in_parts(rows, example):
            return rows
        self.met.add(node)
        return rows._replace(cause=None)

    def _unsure(self) -> Cause | None:
        return None if self._node is None else _cause(Effect.UNSURE, self._node)

    def in_parts(self, rows: Rows, example: Tensor) -> bool:
        """Whether microbatches have a value's rows, one after another."""
        if not rows.sharded or rows.outer > 1 or self.dims(example) != [rows.dim]:
            return False
        return self.joins(example.shape[rows.dim])

    def dims(self, example: Tensor) -> list[int]:
        """The dimensions whose sizes are of the batch."""
        return [i for i, size in enumerate(example.shape) if self.depends(size)]

    def _of_loss(self, node: fx.Node, rows: Rows) -> Rows:
        """Losses divide by sizes out of sight."""
        if rows.kind is Kind.SUM and named_arguments(node).get("reduction") == 1:
            return rows._replace(kind=Kind.MEAN)
        ratio = rows.cause is not None and rows.cause.effect is Effect.RATIO
        call = label_mean(node) if ratio else None
        if call is not None and call["weight"] is None:
            return Rows(Kind.MEAN)  # with label_smoothing
        return rows

    def _placed(self, node: fx.Node, rows: Rows, example: Tensor) -> Rows:
        """With the dimension of the batch that the symbolic shape shows."""
        dims, name = self.dims(example), name_of(_operation(node)[0]).rstrip("_")
        apart = Rows(Kind.SHARD, dims[0] if dims else 0)
        numbers = [n.meta.get("example_value") for n in node.all_input_nodes]
        if name in INDICES and any(map(self.depends, numbers)):  # draws among rows
            kind = Kind.SHARD if dims else Kind.OTHER
            return apart._replace(kind=kind, cause=_cause(Effect.ORDER, node))
        if rows.kind is Kind.REPLICATE and dims:
            if len(dims) > 1:
                return apart._replace(cause=_cause(Effect.PAIRS, node))
            counts = _counts_rows(node)
            ordered = name in NUMBERED and not counts
            cause = _cause(Effect.ORDER, node) if ordered else None
            return apart._replace(numbers=counts, cause=cause)
        if rows.reduced and dims:  # one value of all rows, for each of them
            cause = rows.cause or _cause(Effect.STATISTICS, node)
            return apart._replace(cause=cause)
        if rows.kind is Kind.UNKNOWN and len(dims) == 1:
            return apart._replace(cause=_cause(Effect.UNSURE, node))
        if not rows.sharded or rows.cause is not None:
            return rows
        if dims != [rows.dim]:
            one = len(dims) == 1 and self.size == 1
            return rows._replace(dim=dims[0], outer=1) if one else UNKNOWN
        if not self.joins(example.shape[rows.dim]):
            return rows._replace(cause=_cause(Effect.ORDER, node))
        return rows

    def depends(self, number: object) -> bool:
        """Whether a number is the batch's size, or a multiple of it, or such; not what
        two inputs' sizes of the batch give divided by each other."""
        if not isinstance(number, (torch.SymInt, torch.SymFloat)):
            return False
        expression: Any = number.node.expr
        found = expression.free_symbols & self.symbols.keys()
        if len(found) > 1:
            rows = next(iter(found))
            sizes = {s: rows * times for s, times in self.symbols.items()}
            found = expression.xreplace(sizes).free_symbols & {rows}
        return bool(found)

    def scaled(self, rows: Rows, tensor: Tensor, factor: int) -> Rows:
        """The rows of a value that has such a factor."""
        if rows.kind is Kind.REPLICATE and tensor.dim() == 0:
            return Rows(Kind.SUM if factor == 1 else Kind.UNKNOWN, numbers=factor == 1)
        kinds = {(Kind.SUM, -1): Kind.MEAN, (Kind.MEAN, 1): Kind.SUM}
        return rows._replace(kind=kinds.get((rows.kind, factor), Kind.UNKNOWN))

    def _factor(self, node: fx.Node) -> int | None:
        """The power of the batch's size in the number that a node multiplies by, or
        gives: 1, -1, 0 for anything else that depends on it, or None. Sizes and
        positions that it reads don't count, nor the ends of a range."""
        target, named = _operation(node)
        schema, name = getattr(target, "_schema", None), name_of(target).rstrip("_")
        if schema is None or name in NUMBERED:
            return None
        sizes = {each.name for each in schema.arguments if "int" in str(each.type)}
        reads: list[fx.Node] = []
        fx.map_arg([v for k, v in named.items() if k not in sizes], reads.append)
        values: list[Any] = [read.meta.get("example_value") for read in reads]
        for value in filter(self.depends, values):
            expression = value.node.expr
            symbol = next(iter(expression.free_symbols & self.symbols.keys()))
            return FACTORS.get(name, 0) * _power(expression, symbol)
        return None


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a tracker the operations that run."""

    supports_higher_order_operators = True

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = tracker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.tracker.see(func, args, kwargs or {}, out)
        return out


UNSURE = (Kind.UNKNOWN, Kind.OTHER)
WEIGHED = (Effect.RATIO, Effect.CONSTANT, Effect.BOTH)
NUMBERED = ("eye", "linspace", "randperm", "arange", "tril_indices", "triu_indices")
INDICES = ("randint", "randint_like", "random")
FACTORS = {"mul": 1, "div": -1, "scalar_tensor": 1, "full": 1, "fill": 1}


def _power(expression: Any, symbol: Any) -> int:
    """1 for what is in proportion to a symbol, -1 for what is to its inverse, else 0.

    Sizes are whole numbers and their quotients are no plain fractions to sympy.
    """
    others = {other: 1 for other in expression.free_symbols}
    try:
        values = [
            float(expression.xreplace(others | {symbol: n})) for n in (24, 48, 96)
        ]
    except TypeError:
        return 0
    if values[0] and values[1] == 2 * values[0] and values[2] == 2 * values[1]:
        return 1
    return -int(bool(values[2]) and values[0] == 2 * values[1] == 4 * values[2])


def _counts_rows(node: fx.Node) -> bool:
    """Whether a node gives numbers from 0 on, which are those of rows."""
    call = named_arguments(node)
    counts = name_of(node.target) == "arange"
    return counts and (call.get("start", 0), call.get("step", 1)) == (0, 1)


def _cause(effect: Effect, node: fx.Node) -> Cause:
    return Cause(effect, name_of(node.target), node.meta.get("stack_trace"))


def _operation(node: fx.Node) -> tuple[Any, dict[str, Any]]:
    """What a node calls, and with what; of a write, the operation that writes."""
    args: Any = node.args
    if name_of(node.target) == "written":
        return args[0], args[1]
    return node.target, named_arguments(node)
