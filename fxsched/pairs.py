"""Whether rows that meet in pairs do in a global-batch stage, or spread over
microbatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from .capture.trace import Traced
from .clock.stage_graph import run_stages, step_seconds
from .draw.palette import clock
from .ir.facts import FACTS, facts
from .ir.request import Request
from .jobs.job import PlanError
from .partition.joint_memory import fullest
from .passes.partition import assign_stages

Trace = Callable[[bool], Traced]  # of a microbatch, whose pairs may be spread


class Predicted(NamedTuple):
    """A step's seconds, and bytes on the worker that holds the most; or why it can't be
    planned."""

    seconds: float
    bytes: float = 0.0
    error: PlanError | None = None


def trace_pairs(trace: Trace, request: Request) -> Traced:
    """The trace of a microbatch, with its pairs as the user says, or where the step
    should be shorter; then its facts say why.

    Raises PlanError where neither can be planned.
    """
    # gradients of gathered embeddings come by rows, in other orders
    spread = trace(request.pairs != "joint" and not request.deterministic)
    if not spread.spread:
        return spread
    if request.pairs == "spread":
        text = "pairs of rows are spread over microbatches, as pairs= says"
        return with_facts(spread, pairs=text)
    joint = trace(False)
    times = [predicted(each, request) for each in (spread, joint)]
    if all(time.error for time in times):
        raise times[1].error or times[0].error  # type: ignore[misc]
    chosen = spread if times[0].seconds < times[1].seconds else joint
    ways = ["spread over microbatches", "in a global-batch stage"]
    how, other = ways if chosen is spread else ways[::-1]
    less, more = sorted(times, key=lambda time: time.seconds)
    time = clock(less.seconds, "s").text
    why = "can't be planned" if more.error else time(more.seconds)
    return with_facts(
        chosen,
        pairs=f"pairs of rows {how}: {time(less.seconds)} a step without sums of "
        f"gradients; {other}: {why}",
    )


def with_facts(traced: Traced, **said: Any) -> Traced:
    """The trace, of which more is known."""
    traced.graph.meta[FACTS] = replace(facts(traced.graph), **said)
    return traced


def predicted(traced: Traced, request: Request) -> Predicted:
    """The step by estimates of its stages; of the first candidate, if the schedule has
    some, whose search comes when the trace is chosen."""
    first, *_ = (*request.schedule.candidates, request.schedule)
    try:
        known = facts(assign_stages(traced.graph, replace(request, schedule=first)))
        if request.schedule.candidates:
            traced.graph.meta[FACTS] = replace(known, schedule=None)
        assert known.schedule is not None, "stages are assigned"
        seconds = step_seconds(run_stages(known.schedule, known.stages))
        return Predicted(seconds, fullest(known.schedule, known.stages).bytes)
    except PlanError as error:
        return Predicted(float("inf"), error=error)
