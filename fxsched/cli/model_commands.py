"""The commands that take a model: search, which can do without, and plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from ..dry_run import plan as make_plan
from ..jobs import PlanError
from ..tuner.search import OBJECTIVES
from ..tuner.search import search as find
from . import simulate_options, user_file
from .option_types import choice, count, dims, number, position
from .options import WORKERS, build, given, schedule_option, schedule_options

MODEL = "path/to/model.py:make or package.module:make"
SEARCHES = (
    "workers",
    "microbatches",
    "memory_limit",
    "transfer",
    "prefetch",
    "objective",
    "effort",
    "seed",
)


@click.command()
@click.option("--workers", type=count, default=WORKERS, help="how many workers")
@click.option(
    "--microbatches", type=count, help="how many  [default: twice the workers]"
)
@simulate_options.time_options
@simulate_options.prefetch_option
@click.option(
    "--memory-limit",
    type=number,
    help="activations of a stage that a worker may hold; with --model, bytes of "
    "weights, gradients and activations",
)
@click.option(
    "--objective",
    type=choice(OBJECTIVES),
    default="latency",
    help="what to make short: one step, or steps that follow each other (span)",
)
@click.option(
    "--effort", type=number, default=1.0, help="how many orders to try; 1: 10 seconds"
)
@click.option("--seed", type=position, metavar="N", default=0, help="of the search")
@click.option("--model", metavar="MODEL", help=f"{MODEL}; see plan")
@simulate_options.picture_options
@click.pass_context
def search(ctx: click.Context, /, model: str | None, **options: Any) -> None:
    """Look for the schedule with the shortest step.

    Among the library with all its parameters, and orders of jobs found on its
    placements. --forward and the like are of one stage of a model that is cut into one
    for each worker; with --model, they are estimated from the model.
    """
    if model is None:
        simulate_options.transfer(
            options
        )  # which says what is wrong before it takes long
        found = find(simulate_options.durations(options), **_search_options(options))
        click.echo()
        size = options["workers"] / (found.stages or options["workers"])
        simulate_options.show(simulate_options.simulate(found, options, size), options)
        return
    for name in ("forward", "backward", "weight", "transfer", "prefetch"):
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise PlanError(f"--{name} doesn't go with --model: it is estimated")
    case = user_file.load(model)
    with user_file.quiet_torch(), user_file.blamed(case.file, "the model raised"):
        chosen = _search_options(options) | {"transfer": None}
        found = find(case.model, **chosen, args=case.args, kwargs=case.kwargs)
        made = make_plan(case.model, found, *case.args, **case.kwargs)
    click.echo(f"\n{made.explain()}")
    simulate_options.draw(made.simulate(), options, unit="s")


def _search_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in SEARCHES}


@click.command()
@click.argument("model", metavar="MODEL")
@schedule_option
@schedule_options
@click.option(
    "--modules", help="names of modules, each of which starts a stage, with commas"
)
@click.option(
    "--carry",
    type=choice(("saved", "recompute")),
    default="saved",
    help="what B gets: what F saved, or the inputs to run F again",
)
@click.option(
    "--memory-limit",
    type=number,
    help="bytes of weights, gradients and activations on a worker",
)
@click.option(
    "--batch-dims",
    type=dims,
    help="where arguments have their samples that aren't cut along dimension 0: "
    "cand=0,x=1,scale=none; see fxsched.backend",
)
@click.option(
    "--rank", type=position, metavar="N", help="print the program of this worker alone"
)
@click.option("--explain", is_flag=True, help="print no programs")
@simulate_options.picture_options
def plan(model: str, schedule: str, **options: Any) -> None:
    """The plan of your model: stages and programs.

    MODEL is path/to/model.py:make or package.module:make. make() returns (model,
    inputs): inputs are a tuple, a dict of keyword arguments, or one tensor. Nothing
    runs, and one process plans for any number of workers.
    """
    chosen = build(schedule, given(options))
    rank = options["rank"]
    if rank is not None and rank >= chosen.workers:
        raise PlanError(f"--rank {rank}: workers are 0..{chosen.workers - 1}")
    case = user_file.load(model)
    modules = options["modules"]
    with user_file.quiet_torch(), user_file.blamed(case.file, "the model raised"):
        found = make_plan(
            case.model,
            chosen,
            *case.args,
            stages="auto" if modules is None else modules.split(","),
            carry=options["carry"],
            memory_limit=options["memory_limit"],
            batch_dims=options["batch_dims"],
            **case.kwargs,
        )
    parts = list(found.notes)
    if rank is None or options["explain"]:
        parts.append(found.explain())
    if rank is not None:
        parts.append(found.table(rank))
    elif not options["explain"]:
        parts += map(found.table, range(chosen.workers))
    click.echo("\n\n".join(parts))
    if rank is not None and options["text"] is None:
        options["text"] = False
    simulate_options.draw(found.simulate(), options, unit="s")
