"""Powers of two factors in the values of a backward that a user wrote.

A value of a microbatch is the whole batch's times the number of microbatches to some
power: sizes of the batch that are read as numbers (len(x)) have -1. And it has a degree
in the gradient that arrives: twice that gradient, twice a value of degree 1.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from ..ir.graphs import is_view, name_of, storage, tensors
from .tracker import OVER, TIMES, Tracker


class Grade(NamedTuple):
    """The two powers of a value; None for one that is not known."""

    power: int | None = 0
    degree: int | None = 0


FLAT = Grade()
NOTHING: Grade | None = None  # of zeros, which have any
HOW = {
    name: how
    for how, names in (
        ("product", "mul mm bmm mv dot vdot"),
        ("biased", "addmm baddbmm addmv"),  # a sum with a product
        ("sum", "add sub cat stack where copy index_put masked_scatter"),
        (
            "zeros",
            "zeros zeros_like new_zeros empty empty_like new_empty zero empty_strided "
            "new_empty_strided",
        ),
        (
            "linear",
            "clone _to_copy detach alias neg sum mean cumsum flip roll index "
            "index_select gather slice_backward select_backward triu tril repeat "
            "constant_pad_nd",
        ),
    )
    for name in names.split()
}


class Grades:
    """Those of the tensors of one trace; a tensor and its views have one."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._of: dict[int, tuple[Tensor, Grade | None]] = {}

    def of(self, tensor: Tensor) -> Grade | None:
        """The grade of a tensor; None for zeros."""
        entry = self._of.get(storage(tensor))
        return FLAT if entry is None else entry[1]

    def put(self, tensor: Tensor, grade: Grade | None) -> None:
        """Notes the grade of a tensor."""
        self._of[storage(tensor)] = tensor, grade

    def see(self, func: Any, args: Sequence[Any], kwargs: Any, out: Any) -> None:
        """Notes the grades of an operation's results."""
        read = [*tensors(args), *tensors(tuple(kwargs.values()))]
        name = name_of(func).rstrip("_")
        grades = [self.of(tensor) for tensor in read]
        if is_view(func) and not func._schema.is_mutable:
            grade = grades[0]
        else:
            whole = [not (t.is_floating_point() or t.is_complex()) for t in read]
            if HOW.get(name) == "sum" and all(
                g == FLAT for g, w in zip(grades, whole, strict=True) if w
            ):  # by a mask or an index
                grades = [g for g, w in zip(grades, whole, strict=True) if not w]
            grade = _result(name, grades, args)
        for tensor in tensors(out):
            self.put(tensor, grade)

    def settle(self, node: fx.Node, value: Any) -> None:
        """Notes the sizes of the batch that a node reads as numbers."""
        degree = self.tracker.degree(node)
        if degree is None:
            return
        name = name_of(node.target)
        first = node.args[0] if node.args else None
        if name in TIMES or self.tracker.depends(_example(first)):
            degree = -degree
        elif name not in OVER:
            degree = 0
        for tensor in tensors(value):
            before = self.of(tensor)
            if before is not None:
                known = degree and before.power is not None
                power = before.power + degree if known else None  # type: ignore[operator]
                self.put(tensor, before._replace(power=power))


def _example(value: Any) -> object:
    return value.meta.get("example_value") if isinstance(value, fx.Node) else None


def _result(
    name: str, read: Sequence[Grade | None], args: Sequence[Any]
) -> Grade | None:
    how, zero = HOW.get(name), bool(args) and _is_zero(args)
    if how == "zeros" or (name in ("full", "scalar_tensor") and zero):
        return NOTHING
    if name == "div" and len(read) > 1:
        return _quotient(*read)
    if how == "product" or name == "div":
        return _product(read)
    if how == "biased":
        return _alike([read[0], _product(read[1:])])
    if how == "sum" or (name == "masked_fill" and not zero):
        number = name in ("add", "sub", "masked_fill") and len(read) < 2
        return _alike([*read, *[FLAT] * number])
    linear = how == "linear" or name == "masked_fill"
    if linear and all(each == FLAT for each in read[1:]):
        return read[0] if read else FLAT
    return _any(read)


def _is_zero(args: Sequence[Any]) -> bool:
    return not isinstance(args[-1], Tensor) and args[-1] == 0


def _product(read: Sequence[Grade | None]) -> Grade | None:
    if any(each is None for each in read):
        return NOTHING
    powers, degrees = zip(*filter(None, read), strict=True)
    return Grade(_total(powers), _total(degrees))


def _total(powers: Iterable[int | None]) -> int | None:
    total = 0
    for power in powers:
        if power is None:
            return None
        total += power
    return total


def _quotient(above: Grade | None, below: Grade | None) -> Grade | None:
    """Of degree 1 in a gradient only if that is not below: else it is not linear."""
    if above is None:
        return NOTHING
    below = below or Grade(None, None)
    known = None not in (above.power, below.power)
    power = operator.sub(above.power, below.power) if known else None
    return Grade(power, above.degree if below.degree == 0 else None)


def _alike(read: Sequence[Grade | None]) -> Grade | None:
    """What is added up has to be of one grade."""
    known = [each for each in read if each is not None]
    if not known:
        return NOTHING
    same = [len(set(each)) == 1 for each in zip(*known, strict=True)]
    return Grade(*(each if s else None for each, s in zip(known[0], same, strict=True)))


def _any(read: Sequence[Grade | None]) -> Grade:
    """Of a function that need not be linear."""
    known = [each or FLAT for each in read]
    flat = [all(power == 0 for power in each) for each in zip(*known, strict=True)]
    return Grade(*(0 if f else None for f in flat)) if known else FLAT
