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
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator

from ..ir.graphs import name_of, tensors
from .declared import DECLARED, backward_meets
from .grades import Grade, Graded
from .kinds import Cause, Effect, Kind, Rows
from .tracker import Tracker, Watch

FUNCTION, HOOK = "autograd_function_apply", "register_hook"  # its names in Dynamo
SUMS = {Kind.SUM: 0, Kind.MEAN: -1, Kind.SHARED: -1}  # powers that make one a sum


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
    if own_name(node) == HOOK:
        gradients, inputs = body.of_hook(*args), args[:1]
    else:
        gradients, inputs = body.of_function(value, *args), args[2:]
    if body.unknown is not None or len(gradients) != len(inputs):
        where = body.unknown or node
        return _cause(where, node, Effect.UNSURE), False
    meets, linear = None, True
    for gradient, of in zip(gradients, inputs, strict=True):
        if isinstance(gradient, Tensor) and isinstance(of, Tensor):
            rows, grade = body.of(gradient), body.grade(gradient)
            if not _is_right(rows, grade, tracker.of(of)):
                meets = meets or body.cause(rows, node)
            linear &= grade is None or grade.degree == 1
    return meets, linear


def _is_right(rows: Rows, grade: Grade | None, of: Rows) -> bool:
    """Whether a microbatch's gradient of a value is what the step takes it for."""
    if grade is None:
        return True
    if not rows.plain or grade.power is None:
        return False
    if of.apart and rows.place != of.place:
        return False
    wanted = of.of_gradient.kind
    if wanted in (Kind.APART, Kind.SHARED):
        return (rows.kind, grade.power) == (wanted, _power(of))
    return SUMS.get(rows.kind) == grade.power


def _power(of: Rows) -> int:
    """Of the number of microbatches, in the gradient that arrives at a value."""
    return -1 if of.kind is Kind.MEAN else 0


class _Body(Graded):
    """The rows of the values of a backward's graphs, which run on fake tensors.

    unknown: a node that could not be followed.
    mixed: the first of a power that is not known.
    """

    def __init__(self, outer: Tracker) -> None:
        super().__init__(outer)
        self.outer = outer
        self.unknown: fx.Node | None = None
        self.mixed: fx.Node | None = None

    def of_hook(
        self, tensor: Tensor, hook: fx.GraphModule, *free: Any
    ) -> Sequence[Any]:
        """The gradient that a hook makes of a tensor's."""
        return [self._run(hook, [self._gradient(tensor), *map(self._copy, free)])]

    def of_function(
        self, value: Any, forward: fx.GraphModule, backward: fx.GraphModule, *args: Any
    ) -> Sequence[Any]:
        """The gradients of a function's inputs, by their positions; none if Dynamo's
        form of it is not known."""
        result = self._run(forward, [*map(self._copy, args)])
        known = self.unknown is None and isinstance(result, tuple)
        if not known or len(result) != 2:
            return ()
        outputs = value if isinstance(value, (tuple, list)) else (value,)
        gradients = self._run(backward, [*map(self._gradient, outputs), *result[1]])
        return gradients if isinstance(gradients, (tuple, list)) else [gradients]

    def _copy(self, value: Any) -> Any:
        """A value of the graph around, for a body that may write into it."""
        if not isinstance(value, Tensor):
            return value
        new = value.detach().clone()
        self.put(new, self.outer.of(value))
        return new

    def _gradient(self, value: Any) -> Any:
        """The gradient that arrives at a value: of a microbatch, one with rows where
        that has some, a part of a sum where it has none."""
        if not isinstance(value, Tensor):
            return None
        new, of = torch.zeros_like(value), self.outer.of(value)
        unsure = of.kind in (Kind.OTHER, Kind.UNKNOWN)
        self.put(new, Rows(Kind.SUM, cause=of.cause) if unsure else of.of_gradient)
        self.put_grade(new, Grade(_power(of), 1))
        return new

    def _run(self, gm: fx.GraphModule, args: Sequence[Any]) -> Any:
        with torch.no_grad():
            return _Run(gm, self).run(*args)

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
        if self.mixed is None and any(g and g.power is None for g in grades):
            self.mixed = node

    def cause(self, rows: Rows, node: fx.Node) -> Cause:
        """Where rows met in a gradient that is not right."""
        if rows.cause is not None and rows.cause.stack:
            return rows.cause._replace(effect=Effect.BACKWARD)
        return _cause(self.mixed or node, node, Effect.BACKWARD)


class _Run(fx.Interpreter):
    """Shows what the nodes of a graph give."""

    def __init__(self, gm: fx.GraphModule, body: _Body) -> None:
        super().__init__(gm)
        self.body = body

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What it is given, if it is."""
        return next(self.args_iter, None)

    def run_node(self, node: fx.Node) -> Any:
        """What a node gives, which the body learns."""
        if not node.op.startswith("call"):
            return super().run_node(node)
        self.body.enter(node)
        with Watch(self.body):
            value = super().run_node(node)
        self.body.settle(node, value)
        return value


def _cause(where: fx.Node, node: fx.Node, effect: Effect) -> Cause:
    stack = where.meta.get("stack_trace") or node.meta.get("stack_trace")
    return Cause(effect, _name(where), stack)


def _name(node: fx.Node) -> str:
    words = {FUNCTION: "a torch.autograd.Function", HOOK: "a hook on a gradient"}
    return words.get(own_name(node) or "") or name_of(node.target)
