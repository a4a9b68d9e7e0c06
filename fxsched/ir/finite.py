"""What check_finite=True puts into programs: a look at what each job makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class NonFinite(FloatingPointError):
    """A job made a NaN or Inf.

    given: what it was called with, to look for the operation.
    """

    def __init__(self, text: str, given: tuple[Any, ...]) -> None:
        super().__init__(text)
        self.given = given


def finite(
    job: str, values: Sequence[Any], names: Sequence[tuple[int, str]], *given: Any
) -> None:
    """Raises NonFinite if a job made a NaN or Inf.

    values: the job's results. names: (position, name) of each result that is checked.
    given: the job's arguments.
    """
    for place, name in names:
        made = values[place]
        for value in (made,) if isinstance(made, Tensor) else made:
            if kind := nonfinite(value):
                raise NonFinite(f"{job} made {kind} in {name}", given)


def nonfinite(value: object) -> str | None:
    """ "NaN" or "Inf", if a tensor has one."""
    floating = isinstance(value, Tensor) and value.dtype.is_floating_point
    if not floating or bool(value.isfinite().all()):  # type: ignore[attr-defined]
        return None
    return "NaN" if bool(torch.isnan(value).any()) else "Inf"  # type: ignore[arg-type]
