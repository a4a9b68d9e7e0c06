"""Where rows of a batch meet in a backward that a user wrote: that of a
torch.autograd.Function, or a hook on a tensor.

B of PyTorch's own operations keeps rows apart where F does. What a user wrote is in
the model's graph as a body of its own, which is followed here as F is:

    y = autograd_function_apply(fwd_body, bwd_body, x, w)[0]; z = register_hook(y, body)

A gradient has to be what the step makes of microbatches': that of a value with rows has
the same rows, that of one without is a sum.

A value has a grade. It is the whole batch's times the number of microbatches to some
power: sizes of the batch that are read as numbers (len(x)) have -1. And it has a degree
in the gradient that arrives: twice that gradient, twice a value of degree 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from math import isnan, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator

from ..ir.graphs import is_mutable, is_view, name_of, storage, tensors
from .declared import DECLARED, backward_meets
from .kinds import Cause, Effect, Kind, OpCall, Rows
from .tracker import Tracker, Watch

NOTHING: Grade | None = None  # of zeros, which have any
OPERATIONS = {
    "mul mm bmm mv dot vdot": "product",
    "addmm baddbmm addmv": "biased",  # a sum with a product
    "add sub cat stack where copy index_put masked_scatter": "sum",
    "zeros zeros_like new_zeros empty empty_like new_empty zero empty_strided "
    "new_empty_strided": "zeros",
    "clone _to_copy detach alias neg sum mean cumsum flip roll index index_select "
    "gather slice_backward select_backward triu tril repeat constant_pad_nd": "linear",
}
HOW = {name: how for names, how in OPERATIONS.items() for name in names.split()}
FUNCTION, HOOK = "autograd_function_apply", "register_hook"  # its names in Dynamo
SUMS = {Kind.SUM: 0, Kind.MEAN: -1, Kind.REPLICATE: -1}  # powers that make one a sum


class Grade(NamedTuple):
    """The two powers of a value; nan for one that is not known."""

    power: float = 0
    degree: float = 0


FLAT = Grade()


def graded(call: OpCall, read: Sequence[Grade | None]) -> Grade | None:
    """The grade of what an operation gives, by those of the tensors that it reads."""
    if is_view(call.target) and not is_mutable(call.target):
        return read[0]
    name, last = call.name, call.args[-1] if call.args else None
    zero, how = not isinstance(last, Tensor) and last == 0, HOW.get(name)
    if how == "zeros" or (zero and name in ("full", "scalar_tensor")):
        return NOTHING
    if name == "div" and call.get("rounding_mode") is None:
        read, how = [*read[:1], *map(_inverse, read[1:])], "product"
    if name == "masked_fill":
        how = "linear" if zero else "sum"
    if how == "product":
        return _product(read)
    if how == "biased":
        return _alike([read[0], _product(read[1:])])
    if how == "sum":
        read = _without_masks(call, read)
        number = name in ("add", "sub", "masked_fill") and len(read) < 2
        return _alike([*read, *[FLAT] * number])
    if how == "linear" and read and all(each == FLAT for each in read[1:]):
        return read[0]
    # of a function that need not be linear
    return _each(lambda p: nan if any(p) else 0, [r or FLAT for r in read])


def _without_masks(
    call: OpCall, read: Sequence[Grade | None]
) -> Sequence[Grade | None]:
    """Without masks and indices, where they depend on neither."""
    floats: list[Grade | None] = []
    for grade, tensor in zip(read, call.tensors(), strict=True):
        if tensor.is_floating_point() or tensor.is_complex():
            floats.append(grade)
        elif grade != FLAT:
            return read
    return floats


def _each(rule: Callable[[Any], float], read: Sequence[Grade]) -> Grade:
    """What becomes of each of the two powers."""
    return Grade(*map(rule, zip(*read, strict=True)))


def _product(read: Sequence[Grade | None]) -> Grade | None:
    known = [each for each in read if each is not None]
    return _each(sum, known) if len(known) == len(read) else NOTHING


def _inverse(grade: Grade | None) -> Grade:
    """That of one divided by it, which is not linear in the gradient."""
    power, degree = grade or Grade(nan, nan)
    return Grade(-power, nan if degree else 0)


def _alike(read: Sequence[Grade | None]) -> Grade | None:
    """What is added up has to be of one grade."""
    known = [each for each in read if each is not None]
    same = _each(lambda p: p[0] if len(set(p)) == 1 else nan, known)
    return same if known else NOTHING


def own_name(node: fx.Node) -> str | None:
    """What Dynamo calls a node whose backward a user wrote; None for any other."""
    if isinstance(node.target, HigherOrderOperator):
        name = str(node.target.name())  # type: ignore[no-untyped-call]
        return name if name in (FUNCTION, HOOK) else None
    return None


def follow_backward(
    node: fx.Node, args: Sequence[Any], kwargs: Any, value: Any, tracker: Tracker
) -> None:
    """Notes what becomes of rows in the backward of a node of the model's graph, if a
    user wrote it, or says what it does, and it runs.

    args, kwargs, value: of the node, fake; `tracker` has their rows.
    """
    if not any(t.requires_grad for t in tensors(value)):
        return
    if node.target in DECLARED:
        call = tracker.call(node.target, args, kwargs, value)
        tracker.note_backward(node, value, backward_meets(call), linear=True)
    elif own_name(node) is not None:
        meets, linear = _followed(node, args, value, tracker)
        tracker.note_backward(node, value, meets, linear)


def _followed(
    node: fx.Node, args: Sequence[Any], value: Any, tracker: Tracker
) -> tuple[Cause | None, bool]:
    """Where rows meet in a user's backward, if they do, and whether gradients are in
    proportion to those that arrive."""
    body = _Body(tracker)
    gradients: Any = ()
    if own_name(node) == HOOK:
        tensor, hook, *free = args
        inputs = [tensor]
        gradients = [body.run(hook, [body.gradient(tensor), *map(body.copy, free)])]
    else:
        forward, backward, *inputs = args
        result = body.run(forward, [*map(body.copy, inputs)])
        if body.unknown is None and isinstance(result, tuple) and len(result) == 2:
            outputs = value if isinstance(value, (tuple, list)) else (value,)
            arriving = map(body.gradient, outputs)
            gradients = body.run(backward, [*arriving, *result[1]])
    if not isinstance(gradients, (tuple, list)):
        gradients = [gradients]
    if body.unknown is not None or len(gradients) != len(inputs):
        return _cause(body.unknown or node, node, Effect.UNSURE), False
    meets, linear = None, True
    for gradient, of in zip(gradients, inputs, strict=True):
        if isinstance(gradient, Tensor) and isinstance(of, Tensor):
            rows, grade = body.of(gradient), body.grade(gradient)
            if grade is not None and not _is_right(rows, grade, tracker.of(of)):
                meets = meets or body.cause(rows, node)
            linear &= grade is None or grade.degree == 1
    return meets, linear


def _is_right(rows: Rows, grade: Grade, of: Rows) -> bool:
    """Whether a microbatch's gradient of a value is what the step takes it for."""
    wanted = of.of_gradient.kind
    if not rows.plain or (of.sharded and rows.place != of.place):
        return False
    if wanted in (Kind.SHARD, Kind.REPLICATE):
        return (rows.kind, grade.power) == (wanted, _power(of))
    return SUMS.get(rows.kind) == grade.power


def _power(of: Rows) -> int:
    """Of the number of microbatches, in the gradient that arrives at a value."""
    return -1 if of.kind is Kind.MEAN else 0


class _Body(Tracker):
    """The rows and grades of the values of a backward's graphs, which run on fake
    tensors. A tensor and its views have one grade.

    unknown: a node that could not be followed.
    mixed: the first of a power that is not known.
    """

    def __init__(self, outer: Tracker) -> None:
        super().__init__(outer.size, outer.symbols)
        self.outer = outer
        self.unknown: fx.Node | None = None
        self.mixed: fx.Node | None = None
        self._grades: dict[int, Grade | None] = {}  # by storage

    def grade(self, tensor: Tensor) -> Grade | None:
        """The grade of a tensor; None for zeros."""
        return self._grades.get(storage(tensor), FLAT)

    def see(self, func: Any, args: Sequence[Any], kwargs: Any, out: Any) -> None:
        """Notes the rows and grades of an operation's results."""
        super().see(func, args, kwargs, out)
        call = self.call(func, args, kwargs, out)
        grade = graded(call, [self.grade(tensor) for tensor in call.tensors()])
        self._grades |= {storage(tensor): grade for tensor in tensors(out)}

    def scaled(self, rows: Rows, tensor: Tensor, factor: int) -> Rows:
        """Notes what a number of the batch's size does to a tensor's grade."""
        before = self.grade(tensor)
        if before is not None:
            power = before.power - factor if factor else nan
            self._grades[storage(tensor)] = before._replace(power=power)
        return rows

    def copy(self, value: Any) -> Any:
        """A value of the graph around, for a body that may write into it."""
        if not isinstance(value, Tensor):
            return value
        new = value.detach().clone()
        self.put(new, self.outer.of(value))
        return new

    def gradient(self, value: Any) -> Any:
        """The gradient that arrives at a value: of a microbatch, one with rows where
        that has some, a part of a sum where it has none."""
        if not isinstance(value, Tensor):
            return None
        new, of = torch.zeros_like(value), self.outer.of(value)
        unsure = of.kind in (Kind.OTHER, Kind.UNKNOWN)
        self.put(new, Rows(Kind.SUM, cause=of.cause) if unsure else of.of_gradient)
        self._grades[storage(new)] = Grade(_power(of), 1)
        return new

    def run(self, gm: fx.GraphModule, args: Sequence[Any]) -> Any:
        """What a graph gives, whose nodes it learns of; some inputs may lack."""
        run = fx.Interpreter(gm)
        run.args_iter = chain(args, repeat(None))
        for node in gm.graph.nodes:
            self.enter(node)
            with torch.no_grad(), Watch(self):
                run.env[node] = value = run.run_node(node)
            if node.op.startswith("call"):
                self.settle(node, value)
        return value

    def settle(self, node: fx.Node, value: Any) -> None:
        """As of any value; notes what could not be followed."""
        results = list(tensors(value))
        known = list(tensors(node.meta.get("example_value")))
        nested = isinstance(node.target, HigherOrderOperator)
        if results and (nested or len(known) != len(results)):
            self.unknown = self.unknown or node
            return
        super().settle(node, value)
        grades = map(self.grade, results)
        if self.mixed is None and any(g and isnan(g.power) for g in grades):
            self.mixed = node

    def cause(self, rows: Rows, node: fx.Node) -> Cause:
        """Where rows met in a gradient that is not right."""
        if rows.cause is not None and rows.cause.stack:
            return rows.cause._replace(effect=Effect.BACKWARD)
        return _cause(self.mixed or node, node, Effect.BACKWARD)


def _cause(where: fx.Node, node: fx.Node, effect: Effect) -> Cause:
    stack = where.meta.get("stack_trace") or node.meta.get("stack_trace")
    return Cause(effect, _name(where), stack)


def _name(node: fx.Node) -> str:
    words = {FUNCTION: "a torch.autograd.Function", HOOK: "a hook on a gradient"}
    return words.get(own_name(node) or "") or name_of(node.target)
