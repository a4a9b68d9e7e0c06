"""Schedules side by side: a table of their simulated steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..draw import tables
from ..draw.whole_stages import meet_notes, stage_count
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..simulator.simulate import Simulation
from ..tuner.candidates import moves_weights
from .options import (
    EVERY,
    Refused,
    build_any,
    check_work,
    constructor_parameters,
    flag,
    passed_options,
    usual,
)
from .simulate_options import simulate, transfer

HEADERS = "schedule|stages|step|bubble|span|held|kept|fetched|sent"
FREE = (
    "* weights or gradients move, here in no time: ranked apart; --prefetch counts it"
)


class ComparedSchedule(NamedTuple):
    """A schedule's simulated step. size: of its stages, in those of the model.

    free: whether weights or gradients move, and that takes no time.
    """

    name: str
    simulation: Simulation
    size: float
    free: bool

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        simulation, workers = self.simulation, self.simulation.workers
        sent = sum(w.activations_sent + w.gradients_returned for w in workers)
        return (
            f"{'* ' if self.free else ''}{self.name}",
            stage_count(simulation.stages),
            f"{simulation.latency:.4g}",
            f"{100 * simulation.bubble_rate:.1f} %",
            f"{100 * simulation.span_bubble_rate:.1f} %",
            f"{self.size * max(w.peak_activations for w in workers):.4g}",
            f"{self.size * max(w.weights_held for w in workers):.4g}",
            f"{sum(w.weight_fetches for w in workers)}",
            f"{sent}",
        )


def lineup(schedules: Mapping[str, str | Schedule], options: Mapping[str, Any]) -> str:
    """A table, the shortest step first, and a line for each that can't be built.

    The times are of one stage of a model that is cut into as many as `stages` says, or
    one for each worker. A schedule that cuts it into more has shorter ones; its
    activations and weights are counted in stages of that size. As in a search, those
    that move weights are ranked with the others if it is said how long that takes.
    Raises PlanError if none can be built, or none takes an option.
    """
    numbers = passed_options(options)
    for argument in numbers:
        if argument not in (*EVERY, "workers", "microbatches") and not any(
            argument in constructor_parameters(s)
            for s in schedules.values()
            if isinstance(s, str)
        ):
            raise PlanError(
                f"none of these schedules takes {flag(argument)}; leave it out"
            )
    numbers = {**usual(numbers), **numbers}
    # what is wrong for all schedules is said once
    transfer(options)
    check_work(numbers)
    entries: list[ComparedSchedule] = []
    refused = Refused()
    for name, made in schedules.items():
        try:
            entries.append(_entry(name, made, numbers, options))
        except PlanError as error:
            refused.add(name, error)
    lines = refused.lines()
    if not entries:
        more = "; and so on" if len(lines) > 3 else ""
        raise PlanError(
            f"none of these schedules can be built: {'; '.join(lines[:3])}{more}; give "
            "other --workers or --microbatches"
        )
    entries.sort(key=lambda entry: (entry.free, entry.simulation.latency))
    cells, width = [e.cells for e in entries], tables.columns(tables.WIDE)
    table = tables.table(HEADERS, cells, "lr", width, wrap=True)
    notes = [tables.wrapped([FREE], width)] * any(entry.free for entry in entries)
    notes += meet_notes(cells, width)
    parts = _title(numbers), table, *notes, tables.wrapped(lines, width)
    return "\n\n".join(parts).strip()


def _entry(
    name: str,
    made: str | Schedule,
    numbers: Mapping[str, Any],
    options: Mapping[str, Any],
) -> ComparedSchedule:
    schedule = build_any(made, numbers)
    count = _stages(numbers)
    stages = schedule.stages or count
    simulation = simulate(replace(schedule, stages=stages), options, count / stages)
    moves = moves_weights(simulation.schedule, simulation.stages)
    free = moves and options["prefetch"] is None
    size = count / stages / schedule.shards
    return ComparedSchedule(name, simulation, size, free)


def _stages(numbers: Mapping[str, Any]) -> int:
    """How many the times and the counts are of."""
    count: int = numbers.get("stages", numbers["workers"])
    return count


def _title(numbers: Mapping[str, Any]) -> str:
    copies = f", {numbers['shards']} shards" if "shards" in numbers else ""
    copies += f", {numbers['replicate']} copies" if "replicate" in numbers else ""
    return (
        f"{numbers['workers']} workers, {numbers['microbatches']} microbatches{copies},"
        f" a model of {_stages(numbers)} stages"
    )
