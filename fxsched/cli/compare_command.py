"""Schedules side by side: a table of their simulated steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..draw import tables
from ..jobs import PlanError
from ..simulator.simulate import Simulation
from .options import EVERY, arguments, build_any, check_size, flag, given, usual
from .simulate_options import simulate, transfer


def lineup(names: Sequence[str], options: Mapping[str, Any]) -> str:
    """A table, the shortest step first, and a line for each that can't be built.

    The times are of one stage of a model that is cut into as many as `stages` says, or
    one for each worker. A schedule that cuts it into more has shorter ones; its
    activations and weights are counted in stages of that size.
    Raises PlanError if none can be built, or none takes an option.
    """
    numbers = given(options)
    for argument in numbers:
        if argument not in EVERY and not any(argument in arguments(n) for n in names):
            raise PlanError(f"none of these schedules takes {flag(argument)}")
    numbers = {**usual(numbers), **numbers}
    # what is wrong for all schedules is said once
    transfer(options)
    check_size(numbers)
    count: int = numbers.get("stages", numbers["workers"])
    found: list[tuple[float, tuple[str, ...]]] = []
    refused = []
    for name in names:
        try:
            schedule = build_any(name, numbers)
            stages = schedule.stages or count
            size = count / stages
            simulation = simulate(replace(schedule, stages=stages), options, size)
            found.append((simulation.latency, _row(name, simulation, size)))
        except PlanError as error:
            refused.append(f"not {name}: {' '.join(str(error).split())}")
    if not found:
        more = "; and so on" if len(refused) > 3 else ""
        raise PlanError(f"none can be built: {'; '.join(refused[:3])}{more}")
    copies = f", {numbers['replicate']} copies" if "replicate" in numbers else ""
    line = (
        f"{numbers['workers']} workers, {numbers['microbatches']} microbatches"
        f"{copies}, a model of {count} stages (activations and weights are counted in "
        "these)"
    )
    rows = [row for _, row in sorted(found, key=lambda pair: pair[0])]
    return "\n\n".join(
        (line, tables.comparison_table(rows), "\n".join(refused))
    ).strip()


def _row(name: str, simulation: Simulation, size: float) -> tuple[str, ...]:
    workers = simulation.workers
    # F and B of a reference stage are two jobs, even where a B is split
    jobs = 2 * size * len(simulation.stages) * simulation.schedule.microbatches
    sent = sum(w.activations_sent + w.gradients_returned for w in workers)
    return (
        name,
        f"{len(simulation.stages)}",
        f"{simulation.latency:.4g}",
        f"{100 * simulation.bubble_rate:.1f} %",
        f"{100 * simulation.span_bubble_rate:.1f} %",
        f"{jobs / (simulation.latency or 1.0) / len(workers):.3f}",
        f"{size * max(w.peak_activations for w in workers):.4g}",
        f"{size * max(w.weights_held for w in workers):.4g}",
        f"{sum(w.weight_fetches for w in workers)}",
        f"{sent}",
    )
