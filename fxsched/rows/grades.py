"""Powers of two factors in the values of a backward that a user wrote.

A value of a microbatch is the whole batch's times the number of microbatches to some
power: sizes of the batch that are read as numbers (len(x)) have -1. And it has a degree
in the gradient that arrives: twice that gradient, twice a value of degree 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..ir.graphs import is_mutable, is_view, storage, tensors
from .kinds import OpCall, Rows
from .tracker import Tracker


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


class Graded(Tracker):
    """Follows them beside the rows; a tensor and its views have one grade."""

    def __init__(self, outer: Tracker) -> None:
        super().__init__(outer.size, outer.symbols)
        self._grades: dict[int, Grade | None] = {}  # by storage

    def grade(self, tensor: Tensor) -> Grade | None:
        """The grade of a tensor; None for zeros."""
        return self._grades.get(storage(tensor), FLAT)

    def put_grade(self, tensor: Tensor, grade: Grade | None) -> None:
        """Notes the grade of a tensor."""
        self._grades[storage(tensor)] = grade

    def see(self, func: Any, args: Sequence[Any], kwargs: Any, out: Any) -> None:
        """Notes the rows and grades of an operation's results."""
        super().see(func, args, kwargs, out)
        call = self.call(func, args, kwargs, out)
        grades = [self.grade(tensor) for tensor in call.tensors()]
        view = is_view(func) and not is_mutable(func)
        grade = grades[0] if view else _result(call, grades)
        for tensor in tensors(out):
            self.put_grade(tensor, grade)

    def scaled(self, rows: Rows, tensor: Tensor, factor: int) -> Rows:
        """Notes what a number of the batch's size does to a tensor's grade."""
        before = self.grade(tensor)
        if before is not None:
            known = factor != 0 and before.power is not None
            power = before.power - factor if known else None  # type: ignore[operator]
            self.put_grade(tensor, before._replace(power=power))
        return rows


def _result(call: OpCall, read: Sequence[Grade | None]) -> Grade | None:
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
    return _each(lambda p: 0 if set(p) <= {0} else None, [r or FLAT for r in read])


def _without_masks(
    call: OpCall, read: Sequence[Grade | None]
) -> Sequence[Grade | None]:
    """Without masks and indices, where they depend on neither."""
    pairs = list(zip(read, call.tensors(), strict=True))
    floats = [g for g, t in pairs if t.is_floating_point() or t.is_complex()]
    masks = [g for g, t in pairs if not (t.is_floating_point() or t.is_complex())]
    return floats if all(grade == FLAT for grade in masks) else read


def _each(rule: Callable[[Any], int | None], read: Sequence[Grade]) -> Grade:
    """What becomes of each of the two powers."""
    return Grade(*map(rule, zip(*read, strict=True)))


def _product(read: Sequence[Grade | None]) -> Grade | None:
    known = [each for each in read if each is not None]
    if len(known) < len(read):
        return NOTHING
    return _each(lambda powers: None if None in powers else sum(powers), known)


def _inverse(grade: Grade | None) -> Grade:
    """That of one divided by it, which is not linear in the gradient."""
    power, degree = grade or Grade(None, None)
    return Grade(None if power is None else -power, 0 if degree == 0 else None)


def _alike(read: Sequence[Grade | None]) -> Grade | None:
    """What is added up has to be of one grade."""
    known = [each for each in read if each is not None]
    same = _each(lambda p: p[0] if len(set(p)) == 1 else None, known)
    return same if known else NOTHING
