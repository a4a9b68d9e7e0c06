"""How BatchNorm sees the whole batch, as eager's does, and what that costs."""

from __future__ import annotations

from collections.abc import Callable

from .capture.batch_norms import Norms
from .capture.trace import Traced
from .draw.palette import clock
from .draw.tables import byte_text
from .ir.request import Request
from .jobs.job import Direction, Job, PlanError
from .jobs.schedule import Schedule
from .pairs import Predicted, predicted, with_facts

Trace = Callable[[Norms], Traced]
FEW = 8  # norms, between which microbatches may have long ways of their own


def trace_norms(trace: Trace, request: Request, updates_once: bool) -> Traced:
    """The trace of a microbatch, whose BatchNorms are of the whole batch in the way
    that makes the step the shortest; its facts say what another way takes.

    updates_once: whether each update is of the whole batch; else BatchNorms are of each
        microbatch, unless batch_norm= says "batch".
    """
    why = _microbatches(request, updates_once)
    if why:
        traced = trace("microbatch")
        text = f"BatchNorm takes its statistics of each microbatch: {why}"
        quiet = _quiet(traced) if request.batch_norm is None else traced
        return with_facts(quiet, norms=text) if traced.norms else traced
    whole: Norms = "parts" if request.rows == "local" else "whole"
    traced = trace(whole)
    if not traced.norms:
        return traced
    best, seen = traced, predicted(traced, request)
    spreads = _spreads(request.schedule)
    if _may_part(request) and (spreads or traced.norms <= FEW):
        other, parts = _tried(trace, "parts", request)
        if other is not None and parts.seconds < seen.seconds:
            whole, best, seen = "parts", other, parts
    if seen.error:
        raise seen.error
    return with_facts(best, norms=_costs(trace, request, whole, seen, spreads))


def _quiet(traced: Traced) -> Traced:
    """Without warnings of what comes with the schedule."""
    outputs = tuple(
        rows._replace(cause=None)
        if rows and rows.cause and "batch_norm" in rows.cause.operation
        else rows
        for rows in traced.rows
    )
    return traced._replace(rows=outputs)


def _microbatches(request: Request, updates_once: bool) -> str:
    """Why BatchNorms are of each microbatch, if they are."""
    if request.batch_norm == "microbatch":
        return 'batch_norm="microbatch"'
    if request.batch_norm is None and not updates_once:
        return "each update is of a part of the batch"
    if request.loss_reduction != "exact":
        return f'loss_reduction="{request.loss_reduction}"'
    return ""


def _may_part(request: Request) -> bool:
    """Whether microbatches' statistics may be put together: sums have other bits, and
    are rounded on their way."""
    return not request.deterministic and request.encode.activations is None


def _spreads(schedule: Schedule) -> bool:
    """Whether microbatches of a stage run on several workers."""
    if schedule.is_open:
        return False
    every = range(schedule.microbatches)
    places = {schedule.place(Job(0, b, Direction.FORWARD)).compute for b in every}
    return len(places) > 1


def _tried(
    trace: Trace, norms: Norms, request: Request
) -> tuple[Traced | None, Predicted]:
    """A trace and its step, or why there is none."""
    try:
        traced = trace(norms)
    except PlanError as error:
        return None, Predicted(float("inf"), 0.0, error)
    return traced, predicted(traced, request)


def _costs(
    trace: Trace, request: Request, norms: Norms, exact: Predicted, spreads: bool
) -> str:
    """What it costs that BatchNorms are of the whole batch."""
    how = "all rows in one job" if norms == "whole" else "microbatches' put together"
    text = clock(exact.seconds, "s").text
    line = (
        f"BatchNorm makes global-batch stages (*), for statistics of the whole "
        f"batch, {how}: estimated before planning at {text(exact.seconds)} a step "
        f"without sums of gradients, and {byte_text(exact.bytes)} on the fullest worker"
    )
    gain = ", and spread its rows over workers" * (spreads and norms == "whole")
    _, other = _tried(trace, "microbatch", request)
    if other.error is None:
        line += (
            f"; with statistics of each microbatch, {text(other.seconds)} a step, and "
            f"{byte_text(other.bytes)}"
        )
        gain += ", but the step takes longer" * (other.seconds > exact.seconds)
    return f"{line}; batch_norm='microbatch', or GroupNorm, avoid these stages{gain}"
