"""Powers of two factors in the values of a backward that a user wrote.

A value of a microbatch is the whole batch's times the number of microbatches to some
power: sizes of the batch that are read as numbers (len(x)) have -1. And it has a degree
in the gradient that arrives: twice that gradient, twice a value of degree 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from typing import Any, NamedTuple

from torch import Tensor

from ..ir.graphs import is_mutable, is_view
from .kinds import OpCall


class Grade(NamedTuple):
    """The two powers of a value; nan for one that is not known."""

    power: float = 0
    degree: float = 0


FLAT = Grade()
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
