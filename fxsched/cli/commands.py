"""The commands that need no model of the user's: simulate, compare, and the demo."""

from __future__ import annotations

import os
from typing import Any

import click

from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..schedules import LIBRARY, STALE
from . import simulate_options
from .compare_command import lineup
from .option_types import COUNT, names, schedule
from .options import (
    build,
    constructor_parameters,
    passed_options,
    schedule_option,
    schedule_options,
)

SYNCHRONOUS = tuple(name for name in LIBRARY if name not in STALE)


@click.command()
@schedule_option
@schedule_options
@simulate_options.time_options
@simulate_options.update_option
@simulate_options.link_options
@simulate_options.prefetch_option
@simulate_options.picture_options
def simulate(schedule: str | Schedule, **options: Any) -> None:
    """A schedule's step on a virtual clock.

    The model is a chain of equal stages; --forward and the like are times of one.
    """
    chosen = build(schedule, passed_options(options))
    if options["update"] is not None and chosen.update_every is None:
        raise PlanError(
            f"--update: {chosen.name} has no updates; give --update-every too"
        )
    simulate_options.show(simulate_options.simulate(chosen, options), options)


@click.command()
@click.option(
    "--schedules",
    type=names,
    metavar="NAMES",
    help="which, with commas between  [default: all that can be built, but for those "
    "that train with stale weights]",
)
@schedule_options
@simulate_options.time_options
@simulate_options.update_option
@simulate_options.link_options
@simulate_options.prefetch_option
def compare(schedules: tuple[str, ...] | None, **options: Any) -> None:
    """Simulated steps of several schedules side by side.

    --forward, --backward and --weight are of one stage of a model that is cut into
    --stages, or one for each worker. Where a schedule cuts it into more, they are
    shorter, and activations held and weights kept, the most on any worker, are counted
    in stages of that size. Weights fetched and messages sent are those of all workers;
    span is the bubble of steps that follow each other without a gap.
    """
    click.echo(lineup(schedules or SYNCHRONOUS, options))


@click.command(name="demo")
@click.option(
    "--schedule",
    type=schedule,
    metavar="NAME",
    default="lpp",
    help=f"one of {', '.join(LIBRARY)}; or a file that search --save wrote",
)
@schedule_options
@click.option("--steps", type=COUNT, default=160, help="of the optimizer")
@click.option(
    "--device", type=click.Choice(("cpu", "cuda")), default="cpu", help="of the model"
)
def train(schedule: str | Schedule, steps: int, device: str, **options: Any) -> None:
    """Train two transformer encoders by a schedule.

    They tell whether a docstring belongs to a function, on Python's own source.
    Workers are threads, or ranks under torchrun --nproc-per-node W -m fxsched demo.
    """
    from . import demo

    if isinstance(schedule, str):
        takes = constructor_parameters(schedule)
        usual = {"workers": int(os.environ.get("WORLD_SIZE", "4")), "microbatches": 8}
        workers = options["workers"] or usual["workers"]
        usual["group_size"] = workers if workers % 2 else 2
        options |= {k: v for k, v in usual.items() if k in takes and not options[k]}
    demo.demo(build(schedule, passed_options(options)), steps, device)
