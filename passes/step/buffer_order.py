"""Refuses reductions of buffers that F writes once a call, and buffers that would be
written otherwise, where deterministic=True asks for the bits of one process."""

from __future__ import annotations

from torch import dtype

from ...ir.facts import Facts
from ...ir.request import Request
from ...ir.writes import Write
from ...jobs.job import PlanError


def check_declared(request: Request, known: Facts) -> None:
    """Raises PlanError for a reduction over workers of state that has one new value."""
    written = {o.state for o in known.outputs if o.kind not in ("given", "state")}
    states = [state for group in known.groups for state in group.state]
    names = {o.name for o in known.outputs if o.kept or o.replaced}
    names |= {state.name for state in states if state.input in written}
    for name, how in request.buffers.items():
        if name in names:
            raise PlanError(
                f"backend(buffers={{{name!r}: {how!r}}}): the model writes {name} once "
                "a call, of the whole batch, as in eager PyTorch; leave it out"
            )


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
