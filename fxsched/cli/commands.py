"""The commands that can do without a model of the user's: simulate, compare, and the
demo."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click

from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..schedules import LIBRARY, STALE
from . import option_types, simulate_options
from .compare_command import lineup
from .option_types import COUNT, POSITION, RATE, schedule
from .options import (
    SCHEDULE,
    WORKERS,
    build,
    constructor_parameters,
    passed_options,
    schedule_option,
    schedule_options,
)
from .plan_options import ModelCommand

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
    """Simulate a step of a schedule.

    The model is a chain of equal stages. --forward and the other times are those of one
    stage, if the model has --stages stages, or, without --stages, one stage for each
    worker. If the schedule cuts the model into more stages, each of them takes less
    time. compare and search count in the same way.
    """
    chosen = build(schedule, passed_options(options))
    if options["update"] is not None and chosen.update_every is None:
        raise PlanError(
            f"--update: {chosen.name} has no updates; give --update-every too"
        )
    whole = schedule.workers if isinstance(schedule, Schedule) else options["workers"]
    simulate_options.show(chosen, options, options["stages"] or whole or WORKERS)


@click.command(cls=ModelCommand)
@click.option(
    "--schedules",
    "--schedule",
    "schedules",
    multiple=True,
    callback=lambda ctx, param, given: option_types.schedules(",".join(given)),
    metavar="NAMES",
    help="names of schedules, .json files, or path/to/schedule.py:make, with commas "
    "between them, or each with a --schedule of its own  [default: all that can be "
    "built, except those that train with stale weights]",
)
@schedule_options
@simulate_options.time_options
@simulate_options.update_option
@simulate_options.link_options
@simulate_options.prefetch_option
@simulate_options.joint_option
@click.option(
    "--model", metavar="MODEL", help=f"{simulate_options.MODEL}, as for fxsched plan"
)
@click.option(
    "--memory",
    is_flag=True,
    help="with --model: also plan under lower and lower limits of memory, and list the "
    "plans whose step is the shortest of all that hold as little",
)
@click.pass_context
def compare(
    ctx: click.Context,
    /,
    schedules: dict[str, str | Schedule],
    model: str | None,
    **options: Any,
) -> None:
    """Simulate a step of several schedules, and list them, the shortest step first.

    --forward and the other times are those of one stage, if the model has --stages
    stages, or, without --stages, one stage for each worker. If a schedule cuts the
    model into more stages, each of them takes less time. In the table, held is the
    activations and kept is the weights of the worker that has the most; their unit is
    one stage of the size above. fetched is the number of fetches of weights, and sent
    is the number of messages, both of all workers together. span is the bubble if
    each worker begins the next step as soon as it has finished this one.

    With --model, plan that model with each schedule. The table then shows the predicted
    step, and the bytes of the worker that holds the most: all its bytes, and those of
    its weights, with fetched weights. A * in the number of stages marks a global-batch
    stage. With --model, compare also takes the options of fxsched plan.
    """
    every: Mapping[str, str | Schedule] = schedules or dict(
        zip(SYNCHRONOUS, SYNCHRONOUS, strict=True)
    )
    if model is None:
        if options["memory"]:
            raise PlanError("--memory plans a model; give --model too")
        click.echo(lineup(every, options))
        return
    from .compare_plans import model_lineup

    simulate_options.refuse_estimated(ctx)
    click.echo(model_lineup(every, model, options))


@click.command(name="demo")
@click.option(
    "--schedule",
    type=schedule,
    metavar="NAME",
    default="lpp",
    help=SCHEDULE,
)
@schedule_options
@click.option(
    "--steps", type=COUNT, default=160, help="how many steps of the optimizer"
)
@click.option(
    "--learning-rate",
    type=RATE,
    help="learning rate of the optimizer  [default: 0.001, or the part of it that "
    "stale gradients allow, see fxsched stability]",
)
@click.option(
    "--seed",
    type=POSITION,
    default=0,
    help="seed of the model's weights and of the batches",
)
@click.option(
    "--device",
    default="cpu",
    metavar="TYPE",
    help="device of the model: cpu, or the type of this machine's accelerators, such "
    "as cuda; each rank takes the one of its LOCAL_RANK",
)
@click.option(
    "--tables", is_flag=True, help="print the plan and the program of worker 0 too"
)
def train(schedule: str | Schedule, **options: Any) -> None:
    """Train two transformer encoders with a schedule.

    The encoders learn to tell whether a docstring belongs to a function, on the source
    of Python's standard library. Untrained, they are above chance: both begin with the
    same vector for a word, and a function and its docstring share rare words.
    Workers are threads, or, under torchrun --nproc-per-node W -m fxsched demo, ranks. A
    schedule with stale weights makes 8 updates in a call, unless --microbatches is
    given.
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
