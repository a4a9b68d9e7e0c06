"""Schedules side by side: a table of their plans for a user's model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..draw import tables
from ..draw.palette import Clock, clock
from ..draw.whole_stages import meet_notes, stage_count
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..progress import Progress
from ..simulator.simulate import Simulation
from . import user_file
from .options import Refused, build_any, passed_options, usual
from .plan_options import planned_options

HEADERS = "schedule|stages|step {}|bubble|memory|weights|messages"


class ComparedPlan(NamedTuple):
    """A schedule, and the step of its plan, as it is predicted."""

    name: str
    step: Simulation

    def cells(self, time: Clock) -> tuple[str, ...]:
        """A row of the table; bytes are the most on any worker."""
        step, workers = self.step, self.step.workers
        total = max(peaks.at_once.total for peaks in step.memory)
        most = [peaks.each for peaks in step.memory]
        return (
            self.name,
            stage_count(step.stages),
            time.cell(step.latency),
            f"{100 * step.bubble_rate:.1f} %",
            tables.byte_text(total),
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
    time = clock(compared[0].step.latency, "s")
    rows = [row.cells(time) for row in compared]
    width = tables.columns(tables.WIDE)
    table = tables.table(HEADERS.format(time.unit), rows, "lr", width, wrap=True)
    workers, microbatches = numbers["workers"], numbers["microbatches"]
    title = f"{workers} workers, {microbatches} microbatches, {model}"
    said = tables.wrapped(lines, width)
    return "\n\n".join((title, table, *meet_notes(rows, width), said)).strip()
