"""Operations of which users say that they keep rows of a batch apart."""

from __future__ import annotations

import torch

from ..jobs.job import PlanError
from .compute_rules import beside
from .kinds import Kind, OpCall, Rows

DECLARED: set[str] = set()


def keeps_rows(operation: str) -> None:
    """Says that an operation of your own keeps the rows of a batch apart.

    operation: its name as torch.library has it, such as "mylib::attention". Along the
        dimension in which its arguments have their rows, all its results have them
        too, each computed of that row (and of arguments without rows) alone.

    Call it before the model's first call. An operation without this runs once on the
    rows of the whole batch, for it may mix them. One with torch.Tag.pointwise needs no
    more. Raises PlanError for what is no operation.
    """
    library, _, name = str(operation).partition("::")
    known = isinstance(operation, str) and library and name
    if not known or not hasattr(getattr(torch.ops, library), name):
        raise PlanError(
            f"keeps_rows({operation!r}): give the name of an operation that "
            'torch.library knows, such as "mylib::attention"'
        )
    if library == "aten":
        raise PlanError(
            f"keeps_rows({operation!r}): fxsched has rules for PyTorch's own operations"
        )
    DECLARED.add(operation)


def kept(call: OpCall) -> Rows:
    """The rule of operations that keep rows apart."""
    values = [call.of(tensor) for tensor in call.tensors()]
    if not any(rows.kind is Kind.APART for rows in values):
        return Rows(Kind.UNKNOWN)
    return beside(call, *values)
