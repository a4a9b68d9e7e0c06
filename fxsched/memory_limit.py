"""Plans in which no worker holds more than a limit, as plan.memory counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol, TypeVar

from .draw.palette import clock
from .ir.request import Request
from .partition.joint_memory import waiting_text
from .partition.planner import MemoryLimitError
from .plans.plan import Plan

ATTEMPTS = 4  # plans besides the one without a limit
LESS = 0.07
ALMOST = 1.1  # of the limit: a cut that holds as much is searched no more
NEAR = 0.92  # of the limit: if a plan holds as much, no further one is tried


class Planned(Protocol):
    """What has a plan."""

    @property
    def plan(self) -> Plan:
        """The plan."""


Found = TypeVar("Found", bound=Planned)


def plan_within(make: Callable[[Request], Found], request: Request) -> Found:
    """The plan with the shortest predicted step of those within request.memory_limit.

    make: plans for a request, whose limit it keeps by estimates.
    Raises MemoryLimitError with the least that a plan was found to hold.
    """
    limit = request.memory_limit
    if limit is None or request.schedule.shards > 1:
        return make(request)
    plans = [make(replace(request, memory_limit=None))]
    if _held(plans[0]) > limit:
        if (compared := plans[0].plan.compared) is not None:  # with their cuts
            rows = tuple(
                each.schedule for each in (compared.best, *compared.candidates)
            )
            schedule = replace(request.schedule, candidates=rows)
            request = replace(request, schedule=schedule)
        plans += _limited(make, request, limit)
    within = [found for found in plans if _held(found) <= limit]
    if within:
        return min(within, key=lambda found: found.plan.simulate().latency)
    least = min(plans, key=_held).plan
    hint = "" if request.carry == "auto" else _hint(make, request, limit)
    raise _refusal(least, limit, hint)


def _limited(
    make: Callable[[Request], Found], request: Request, limit: float
) -> Iterator[Found]:
    """Plans that should be within the limit. What the estimates miss is seen on each
    plan, and the next one is made for a limit that is lower, or higher, by twice as
    much, and lower by LESS at least, as blocks are large; or for one halfway between
    that of the last plan and one that no plan meets. A cut that was found is kept as
    long as it can be planned."""
    target, met, asked = limit, limit, request
    for _ in range(ATTEMPTS):
        try:
            found = make(replace(asked, memory_limit=target))
        except MemoryLimitError as error:
            if asked is not request:
                asked = request  # another cut may do
            elif error.least > limit:
                target = met = limit = error.least
            elif target == met:  # it was found already
                return
            else:
                target = max((target + met) / 2, error.least)
            continue
        yield found
        met = target
        if found.plan.schedule.cut is not None and _held(found) <= ALMOST * limit:
            asked = replace(request, schedule=found.plan.schedule)
        if NEAR * limit <= _held(found) <= limit:
            return
        more = (limit / _held(found)) ** 2
        target *= more if more > 1 else min(more, 1 - LESS)


def _held(found: Planned) -> float:
    """Bytes of the worker that holds the most."""
    return max(peaks.at_once.total for peaks in found.plan.memory)


def _hint(make: Callable[[Request], Found], request: Request, limit: float) -> str:
    """What suffices, if computing blocks again does."""
    try:
        again = plan_within(make, replace(request, carry="auto")).plan
    except MemoryLimitError:
        return ""
    seconds = again.simulate().latency
    return (
        'write carry="auto", with which B computes blocks again, and the predicted '
        f"step takes {clock(seconds, 's').text(seconds)}; or "
    )


def _refusal(plan: Plan, limit: float, hint: str) -> MemoryLimitError:
    """The error of a limit that the plan with the least memory doesn't keep."""
    held = [peaks.at_once for peaks in plan.memory]
    worker = max(range(len(held)), key=lambda w: held[w].total)
    kinds = held[worker]._asdict().items()
    sizes = ", ".join(f"{kind} {size:.0f}" for kind, size in kinds if size)
    return MemoryLimitError(
        f"memory_limit={limit:.0f}: no cut keeps every worker within it; the best "
        f"found holds {held[worker].total:.0f} bytes on worker {worker} ({sizes}), in "
        f"{len(plan.stages)} stages{waiting_text(plan.schedule, plan.stages)}; {hint}"
        "raise the limit, use more workers or stages, "
        "smaller microbatches, or in_flight",
        held[worker].total,
    )
