"""Refuses buffers that microbatch after microbatch would write otherwise, where
deterministic=True asks for the bits of one process."""

from __future__ import annotations

from torch import dtype

from ..ir.request import Request
from ..ir.writes import Write
from ..jobs.job import PlanError


def check_one_writer(
    request: Request, write: Write, name: str, how: str, kind: dtype
) -> None:
    """Raises PlanError where several workers write a buffer, unless they count."""
    if request.deterministic and (how != "sum" or kind.is_floating_point):
        raise PlanError(
            f"backend(deterministic=True): F writes into {name}, at\n  {write.where}\n"
            "and several workers run it, where one process would write one microbatch "
            "after another; take a schedule in which one worker runs F of a stage, as "
            "in schedules.gpipe"
        )
