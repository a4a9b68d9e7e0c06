"""Where rows of a batch meet in a backward that a user wrote: that of a
torch.autograd.Function, or a hook on a tensor.

B of PyTorch's own operations keeps rows apart where F does. What a user wrote is in
the model's graph as a body of its own, which is followed here as F is:

    y = autograd_function_apply(fwd_body, bwd_body, x, w)[0]; z = register_hook(y, body)

A gradient has to be what the step makes of microbatches': that of a value with rows has
the same rows, that of one without is a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.graphs import name_of, tensors
from .declared import DECLARED, backward_meets
from .grades import Grade, Grades
from .kinds import Cause, Effect, Kind, Rows
from .tracker import Tracker

FUNCTION, HOOK = "autograd_function_apply", "register_hook"  # its names in Dynamo
OUT = {Kind.SUM: (Kind.SHARED, 0), Kind.MEAN: (Kind.SHARED, -1)}  # gradients of these
SUMS = {Kind.SUM: 0, Kind.MEAN: -1, Kind.SHARED: -1}  # powers that make one a sum


def own_name(node: fx.Node) -> str | None:
    """What Dynamo calls a node whose backward a user wrote; None for any other."""
    if isinstance(node.target, HigherOrderOperator):
        name = str(node.target.name())  # type: ignore[no-untyped-call]
        return name if name in (FUNCTION, HOOK) else None
    return None


class Backward(NamedTuple):
    """What becomes of rows in a user's backward.

    meets: where they meet, if they do. linear: whether gradients are in proportion to
        those that arrive.
    """

    meets: Cause | None
    linear: bool


def own_backward(
    node: fx.Node, args: Sequence[Any], kwargs: Any, value: Any, tracker: Tracker
) -> Backward | None:
    """What becomes of rows in the backward of a node of the model's graph, if a user
    wrote it, or says what it does, and it runs.

    args, kwargs, value: of the node, fake; `tracker` has their rows.
    """
    name = own_name(node)
    if not any(t.requires_grad for t in tensors(value)):
        return None
    if node.target in DECLARED:
        call = tracker.call(node.target, args, kwargs, value)
        return Backward(backward_meets(call) if tracker.symbols else None, True)
    if name is None:
        return None
    body = _Body(tracker)
    if name == HOOK:
        gradients, inputs = _of_hook(body, args), args[:1]
    else:
        gradients, inputs = _of_function(body, args, value), args[2:]
    if body.unknown is not None or len(gradients) != len(inputs):
        where = body.unknown or node
        return Backward(_cause(where, node, Effect.UNSURE), False)
    meets, linear = None, True
    for gradient, of in zip(gradients, inputs, strict=True):
        if isinstance(gradient, Tensor) and isinstance(of, Tensor):
            rows, grade = body.rows.of(gradient), body.grades.of(gradient)
            if not _is_right(rows, grade, tracker.of(of)):
                meets = meets or body.cause(rows, node)
            linear &= grade is None or grade.degree == 1
    return Backward(meets if tracker.symbols else None, linear)


def _of_hook(body: _Body, args: Sequence[Any]) -> Sequence[Any]:
    tensor, hook, *free = args
    return [body.run(hook, [body.gradient(tensor), *map(body.copy, free)])]


def _of_function(body: _Body, args: Sequence[Any], value: Any) -> Sequence[Any]:
    """The gradients of its inputs, by their positions; none if Dynamo's form of it is
    not known."""
    forward, backward, *inputs = args
    result = body.run(forward, [body.copy(each) for each in inputs])
    if body.unknown is not None or not isinstance(result, tuple) or len(result) != 2:
        return ()
    outputs = value if isinstance(value, (tuple, list)) else (value,)
    saved = result[1]
    gradients = body.run(backward, [*map(body.gradient, outputs), *saved])
    return gradients if isinstance(gradients, (tuple, list)) else [gradients]


def _is_right(rows: Rows, grade: Grade | None, of: Rows) -> bool:
    """Whether a microbatch's gradient of a value is what the step takes it for."""
    if grade is None:
        return True
    if rows.cause is not None or rows.numbers or grade.power is None:
        return False
    if of.kind is Kind.APART:
        same = rows.kind is Kind.APART and rows.place == of.place
        return same and grade.power == 0
    if of.kind in OUT:
        return (rows.kind, grade.power) == OUT[of.kind]
    return SUMS.get(rows.kind) == grade.power


class _Body(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs graphs on fake tensors and follows the rows of their values.

    unknown: a node that could not be followed.
    """

    def __init__(self, outer: Tracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outer = outer
        self.rows = Tracker(outer.size, outer.symbols)
        self.grades = Grades(self.rows)
        self.unknown: fx.Node | None = None
        self.mixed: fx.Node | None = None  # the first of a power that is not known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.rows.see(func, args, kwargs or {}, out)
        self.grades.see(func, args, kwargs or {}, out)
        return out

    def copy(self, value: Any) -> Any:
        """A value of the graph around, for a body that may write into it."""
        if not isinstance(value, Tensor):
            return value
        new = value.detach().clone()
        self.rows.put(new, self.outer.of(value))
        return new

    def gradient(self, value: Any) -> Any:
        """The gradient that arrives at a value: of a microbatch, one with rows where
        that has some, a part of a sum where it has none."""
        if not isinstance(value, Tensor):
            return None
        new, rows, power = torch.zeros_like(value), self.outer.of(value), 0
        if rows.kind in OUT:
            kind, power = OUT[rows.kind]
            rows = Rows(kind)
        elif rows.kind is not Kind.APART:
            rows = Rows(Kind.SUM, cause=rows.cause)
        self.rows.put(new, rows)
        self.grades.put(new, Grade(power, 1))
        return new

    def run(self, gm: fx.GraphModule, args: Sequence[Any]) -> Any:
        """What a graph returns."""
        values: dict[fx.Node, Any] = {}
        given, interpreter = iter(args), fx.Interpreter(gm)
        with torch.no_grad():
            for node in gm.graph.nodes:
                if node.op == "placeholder":
                    values[node] = next(given, None)
                    continue
                read = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                if node.op == "output":
                    return read[0][0]
                self.rows.enter(node)
                call: Any = getattr(interpreter, node.op)
                with self:
                    values[node] = call(node.target, *read)
                self._settle(node, values[node])
        raise AssertionError("a graph without an output")

    def _settle(self, node: fx.Node, value: Any) -> None:
        results = list(tensors(value))
        known = list(tensors(node.meta.get("example_value")))
        nested = isinstance(node.target, HigherOrderOperator)
        if results and node.op != "get_attr" and (nested or len(known) != len(results)):
            self.unknown = self.unknown or node
            return
        self.rows.settle(node, value, scaled=False)
        self.grades.settle(node, value)
        grades = map(self.grades.of, results)
        if self.mixed is None and any(g and g.power is None for g in grades):
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
