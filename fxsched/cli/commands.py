"""The commands that can do without a model of the user's: simulate, compare, and the
demo."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Any

import click

from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..schedules import LIBRARY, STALE
from . import simulate_options
from .compare_command import lineup
from .option_types import COUNT, POSITION, RATE, names, schedule
from .options import (
    WORKERS,
    build,
    constructor_parameters,
    passed_options,
    schedule_option,
    schedule_options,
)

UPDATES = 8  # in a call of the demo
SYNCHRONOUS = tuple(name for name in LIBRARY if name not in STALE)


@click.command()
@schedule_option
@schedule_options
@simulate_options.time_options
@simulate_options.update_option
@simulate_options.link_options
@simulate_options.memory_options
@simulate_options.prefetch_option
@simulate_options.joint_option
@simulate_options.picture_options
def simulate(schedule: str | Schedule, **options: Any) -> None:
    """A schedule's step on a virtual clock.

    The model is a chain of equal stages. As in compare and search, --forward and the
    like are of one stage of a model that is cut into --stages, or into one for each
    worker; stages of a schedule that cuts it finer take less.
    """
    chosen = build(schedule, passed_options(options))
    if options["update"] is not None and chosen.update_every is None:
        raise PlanError(
            f"--update: {chosen.name} has no updates; give --update-every too"
        )
    whole = schedule.workers if isinstance(schedule, Schedule) else options["workers"]
    count = options["stages"] or whole or WORKERS
    size = count / (chosen.stages or count)
    simulate_options.show(simulate_options.simulate(chosen, options, size), options)


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
@simulate_options.joint_option
@click.option("--model", metavar="MODEL", help=f"{simulate_options.MODEL}; see plan")
@click.pass_context
def compare(
    ctx: click.Context,
    /,
    schedules: tuple[str, ...] | None,
    model: str | None,
    **options: Any,
) -> None:
    """Simulated steps of several schedules side by side.

    --forward, --backward and --weight are of one stage of a model that is cut into
    --stages, or one for each worker. Where a schedule cuts it into more, they are
    shorter, and activations held and weights kept, the most on any worker, are counted
    in stages of that size. Weights fetched and messages sent are those of all workers;
    span is the bubble of steps that follow each other without a gap.

    With --model, plans of that model: predicted steps, and the most bytes that a worker
    holds, all of them and weights alone, fetched ones included. * is a stage of all
    rows.
    """
    if model is None:
        click.echo(lineup(schedules or SYNCHRONOUS, options))
        return
    from .compare_plans import model_lineup

    simulate_options.refuse_estimated(ctx)
    every = schedules or SYNCHRONOUS
    bar = click.progressbar(every, label="planning", file=sys.stderr)
    with bar if sys.stderr.isatty() else nullcontext(every) as chosen:
        text = model_lineup(chosen, model, options)
    click.echo(text)


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
    "--learning-rate",
    type=RATE,
    help="[default: 0.001, or as much of it as `stability` allows stale gradients]",
)
@click.option("--seed", type=POSITION, default=0, help="of the model and the batches")
@click.option(
    "--device", type=click.Choice(("cpu", "cuda")), default="cpu", help="of the model"
)
@click.option(
    "--tables", is_flag=True, help="print the plan and the program of worker 0 too"
)
def train(schedule: str | Schedule, **options: Any) -> None:
    """Train two transformer encoders by a schedule.

    They tell whether a docstring belongs to a function, on Python's own source.
    Workers are threads, or ranks under torchrun --nproc-per-node W -m fxsched demo.
    A schedule with updates of its own has 8 of them in a call.
    """
    from . import demo

    chosen = build(schedule, passed_options(_usual_of_demo(schedule, options)))
    demo.demo(
        chosen,
        options["steps"],
        options["device"],
        options["learning_rate"],
        options["seed"],
        options["tables"],
    )


def _usual_of_demo(name: str | Schedule, options: dict[str, Any]) -> dict[str, Any]:
    """The options, and what the demo takes for those that weren't given."""
    if isinstance(name, Schedule):
        return options
    takes = constructor_parameters(name)
    workers = options["workers"] or int(os.environ.get("WORLD_SIZE", "4"))
    usual = {"workers": workers, "group_size": workers if workers % 2 else 2}
    if "servers" in takes and takes["servers"].default:
        usual["servers"] = workers // 2  # so that those that train divide the batch
    usual = {k: v for k, v in usual.items() if k in takes and not options[k]}
    if name in STALE and not options["microbatches"]:
        every = (options["every"] if "every" in takes else None) or workers
        own = build(name, passed_options(options | usual | {"microbatches": every}))
        usual["microbatches"] = UPDATES * (own.update_every or every)
    elif "microbatches" in takes and not options["microbatches"]:
        usual["microbatches"] = 8
    return options | usual
