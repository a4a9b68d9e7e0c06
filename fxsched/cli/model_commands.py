"""The commands that take a model: search, which can do without, and plan."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from . import simulate_options
from .option_types import COUNT, NUMBER, POSITION, file_of
from .options import (
    WORKERS,
    build,
    flag,
    passed_options,
    schedule_options,
    searched_schedule_option,
)
from .plan_options import ModelCommand, PlanCommand, planned_options

if TYPE_CHECKING:  # it needs torch, which is imported where it is used
    from ..tuner.recommend import Recommendation
    from .user_file import Case

OBJECTIVES = ("latency", "span")
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


@click.command(cls=ModelCommand)
@click.option("--workers", type=COUNT, default=WORKERS, help="how many workers")
@click.option(
    "--microbatches",
    type=COUNT,
    help="how many microbatches  [default: twice the workers]",
)
@simulate_options.time_options
@simulate_options.prefetch_option
@click.option(
    "--memory-limit",
    type=NUMBER,
    help="how many activations of a stage a worker may hold; with --model, how many "
    "bytes of weights, gradients and activations",
)
@click.option(
    "--objective",
    type=click.Choice(OBJECTIVES),
    default="latency",
    help="what to make short: one step (latency), or each of many steps that follow "
    "each other without a gap (span)",
)
@click.option(
    "--effort",
    type=NUMBER,
    default=1.0,
    help="how many orders of jobs to try; with 1, a search takes about 10 seconds",
)
@click.option(
    "--seed",
    type=POSITION,
    metavar="N",
    default=0,
    help="seed of the search's random numbers",
)
@click.option(
    "--model", metavar="MODEL", help=f"{simulate_options.MODEL}, as for fxsched plan"
)
@click.option(
    "--save", type=file_of(".json"), help="write the schedule to this file, name.json"
)
@simulate_options.picture_options
@click.pass_context
def search(ctx: click.Context, /, **options: Any) -> None:
    """Search for the schedule with the shortest step.

    The search tries the schedules of the library with all their parameters, and builds
    other orders of jobs on their placements. --forward and the other times are those of
    one stage of a model that has one stage for each worker; with --model, the search
    estimates the times from the model, and takes the options of fxsched plan.
    """
    from ..tuner.search import search as search_schedules

    if options["model"] is not None:
        _search_for_model(ctx, options)
        return
    simulate_options.transfer(options)  # says what is wrong before it takes long
    durations = simulate_options.durations(options)
    best = search_schedules(durations, **_search_options(options))
    _save(best, options)
    click.echo()
    simulate_options.show(best, options, options["workers"])


def _search_for_model(ctx: click.Context, options: Mapping[str, Any]) -> None:
    """The same with the costs of the user's model; ends with its plan."""
    from . import user_file

    simulate_options.refuse_estimated(ctx)
    case = user_file.load(options["model"])
    sought = _search_options(options) | {"transfer": None, "prefetch": None}
    given = planned_options(options) | {"memory_limit": None}
    best = case.searched(given, **sought)
    _save(best, options)
    planned = case.planned(best, given | {"memory_limit": options["memory_limit"]})
    click.echo(f"\n{planned.explain()}")
    simulate_options.show_pictures(planned.simulate(), options, planned.diagram)


def _recommended(
    case: Case, workers: int, options: Mapping[str, Any]
) -> Recommendation:
    """What is recommended for a model. Raises PlanError for options of one schedule."""
    sizes = ("workers", "microbatches")
    others = [name for name in passed_options(options) if name not in sizes]
    if others:
        raise PlanError(
            f"{flag(others[0])} is an option of a schedule; give --schedule too, or "
            "leave it out"
        )
    given = planned_options(options)
    return case.recommended(workers, options["microbatches"], given)


@click.command(cls=PlanCommand)
@click.argument("model", metavar="MODEL")
@click.option("--workers", type=COUNT, default=WORKERS, help="how many workers")
@click.option(
    "--microbatches",
    type=COUNT,
    help="how many microbatches  [default: the best of one, two and four a worker]",
)
def recommend(model: str, **options: Any) -> None:
    """Recommend a schedule for your model, and say what it gains.

    MODEL is that of fxsched plan. Compares one process, ddp, and the schedule auto,
    with several numbers of microbatches; prints what limits the step, and code to
    paste. --memory-limit and --network say what your machines have.
    """
    from . import user_file

    case = user_file.load(model)
    given = planned_options(options)
    sizes = options["workers"], options["microbatches"]
    click.echo(case.recommended(*sizes, given))


def _save(schedule: Schedule, options: Mapping[str, Any]) -> None:
    if options["save"]:
        schedule.save(options["save"])
        click.echo(f"wrote {options['save']}")


def _search_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in SEARCHES}


@click.command(cls=PlanCommand)
@click.argument("model", metavar="MODEL")
@searched_schedule_option
@schedule_options
@click.option(
    "--rank",
    type=POSITION,
    metavar="N",
    help="print the program of worker N instead of the plan",
)
@click.option(
    "--jobs",
    type=COUNT,
    help="with --rank: how many jobs of the program to print  [default: all]",
)
@simulate_options.picture_options
def plan(model: str, schedule: str | Schedule | None, **options: Any) -> None:
    """Plan your model: print its stages, workers, and what limits the step.

    MODEL is path/to/model.py:make or package.module:make. make() returns (model,
    inputs), where inputs are a tuple, a dict of keyword arguments, or one tensor. It
    may also return (model, inputs, optimizer); the plan then has the optimizer's steps.
    The plan doesn't run, and one process plans for any number of workers. Without
    --schedule, it is the plan that fxsched recommend recommends, for --workers and
    --microbatches.
    """
    from . import user_file

    chosen = None
    if schedule is not None:
        chosen = build(schedule, passed_options(options))
    rank = options["rank"]
    workers = (options["workers"] or WORKERS) if chosen is None else chosen.workers
    if rank is not None and rank >= workers:
        raise PlanError(f"--rank {rank}: give a worker, 0..{workers - 1}")
    case = user_file.load(model)
    if chosen is None:
        recommended = _recommended(case, workers, options)
        click.echo(f"{recommended}\n")
        planned = recommended.plan
    else:
        planned = case.planned(chosen, planned_options(options))
    if rank is None:
        click.echo(planned.explain())
    else:
        width = shutil.get_terminal_size((88, 24)).columns
        click.echo(planned.table(rank, options["jobs"], width))
        options["text"] = options["text"] or False
    simulate_options.show_pictures(planned.simulate(), options, planned.diagram)
