"""Schedules side by side: a table of their plans for a user's model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..draw import tables
from ..draw.palette import Clock, clock
from ..draw.whole_stages import meet_notes, stage_count
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..partition.planner import MemoryLimitError
from ..progress import Progress
from ..simulator.simulate import Simulation
from . import user_file
from .options import Refused, build_any, passed_options, usual
from .plan_options import planned_options

HEADERS = "schedule|stages|step {}|bubble|memory|weights|messages"
LIMITS = (0.8, 0.6, 0.4)  # of what the fastest plan holds


class ComparedPlan(NamedTuple):
    """A schedule, and the step of its plan, as it is predicted."""

    name: str
    step: Simulation

    @property
    def held(self) -> float:
        """Bytes of the worker that holds the most."""
        return max(peaks.at_once.total for peaks in self.step.memory)

    def cells(self, time: Clock) -> tuple[str, ...]:
        """A row of the table; bytes are the most on any worker."""
        step, workers = self.step, self.step.workers
        most = [peaks.each for peaks in step.memory]
        return (
            self.name,
            stage_count(step.stages),
            time.cell(step.latency),
            f"{100 * step.bubble_rate:.1f} %",
            tables.byte_text(self.held),
            tables.byte_text(max(each.weights + each.fetched for each in most)),
            f"{sum(w.activations_sent + w.gradients_returned for w in workers)}",
        )


def model_lineup(
    schedules: Mapping[str, str | Schedule],
    model: str,
    options: Mapping[str, Any],
) -> str:
    """A table, the shortest predicted step first, and a line for each that can't be
    planned for this model.

    With options["memory"], under lower and lower limits of memory, and of all plans
    those that no other beats in both.

    Raises PlanError if none can, or if the model can't be loaded or traced, and for a
    batch that doesn't divide into the microbatches.
    """
    case = user_file.load(model)
    numbers = passed_options(options)
    numbers = {**usual(numbers), **numbers}
    # what is wrong for all schedules is said at once
    planned = planned_options(options)
    alone = {k: v for k, v in planned.items() if k not in ("network", "stages")}
    whole = case.planned(Schedule(1, numbers["microbatches"], 1), alone)
    numbers["microbatches"] = whole.schedule.microbatches  # fewer with --ragged fewer
    compared: list[ComparedPlan] = []
    refused = Refused()
    with Progress("comparison") as progress:
        for number, (name, asked) in enumerate(schedules.items(), 1):
            progress.at(f"planning {name}", number, len(schedules))
            try:
                made = case.planned(build_any(asked, numbers), planned)
                compared.append(ComparedPlan(name, made.simulate()))
            except PlanError as error:
                refused.add(name, error)
    lines = refused.lines()
    if not compared:
        raise PlanError("; ".join(lines[:3]))
    compared.sort(key=lambda row: row.step.latency)
    if options.get("memory"):
        most = compared[0].held
        with Progress("comparison") as progress:
            for number, row in enumerate(list(compared), 1):
                progress.at(f"limits of {row.name}", number, len(schedules))
                built = build_any(schedules[row.name], numbers)
                compared += _limited(case, built, planned, row, most)
        compared = _frontier(compared)
    time = clock(compared[0].step.latency, "s")
    rows = [row.cells(time) for row in compared]
    width = tables.columns(tables.WIDE)
    table = tables.table(HEADERS.format(time.unit), rows, "lr", width, wrap=True)
    workers, microbatches = numbers["workers"], numbers["microbatches"]
    title = f"{workers} workers, {microbatches} microbatches, {model}"
    said = tables.wrapped(lines, width)
    return "\n\n".join((title, table, *meet_notes(rows, width), said)).strip()


def _limited(
    case: user_file.Case,
    schedule: Schedule,
    options: Mapping[str, Any],
    free: ComparedPlan,
    most: float,
) -> Iterator[ComparedPlan]:
    """The plans of a schedule under lower and lower limits, as long as there are some.

    free: its plan without one. most: bytes that limits are shares of.
    """
    held = free.held
    for share in LIMITS:
        if share * most >= held:  # as the last plan
            continue
        limited = {**options, "memory_limit": share * most}
        try:
            row = ComparedPlan(free.name, case.planned(schedule, limited).simulate())
        except MemoryLimitError:
            return
        held = row.held
        yield row


def _frontier(rows: Sequence[ComparedPlan]) -> list[ComparedPlan]:
    """Those that have the shortest step of all that hold as little."""
    kept: list[ComparedPlan] = []
    for row in sorted(rows, key=lambda row: (row.step.latency, row.held)):
        if not kept or row.held < kept[-1].held:
            kept.append(row)
    return kept
