"""The commands: what each takes, and what it prints."""

from __future__ import annotations

import os
from typing import Any

import click

from . import demo, table1, timing, userfile
from .backend import plan as make_plan
from .jobs import PlanError
from .lineup import lineup
from .options import build, given, schedule_options
from .schedules import LIBRARY
from .simulate import simulate as simulate_stages
from .values import choice, choices, count, number, position

MODEL = "path/to/model.py:make or package.module:make"

schedule_option = click.option(
    "--schedule",
    type=choice(LIBRARY),
    required=True,
    help=f"one of {', '.join(LIBRARY)}",
)


@click.command()
@schedule_option
@schedule_options
@timing.time_options
@timing.link_options
@timing.picture_options
def simulate(schedule: str, **options: Any) -> None:
    """A schedule's step on a virtual clock.

    The model is a chain of equal stages; --forward and the like are times of one.
    """
    simulation = timing.simulate(build(schedule, given(options)), options)
    click.echo(simulation.table())
    timing.draw(simulation, options)


@click.command()
@click.option(
    "--schedules",
    type=choices(LIBRARY),
    help="which, with commas between  [default: all that can be built]",
)
@schedule_options
@timing.time_options
@timing.link_options
def compare(schedules: tuple[str, ...] | None, **options: Any) -> None:
    """Simulated steps of several schedules side by side.

    --forward, --backward and --weight are of one stage of a model that is cut into
    --stages, or one for each worker. Where a schedule cuts it into more, they are
    shorter, and activations and weights, the most on any worker, are counted in stages
    of that size. Fetches of weights and other messages are those of all workers; the
    span bubble is that of steps that follow each other without a gap.
    """
    click.echo(lineup(schedules or tuple(LIBRARY), options))


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
    "--rank", type=position, metavar="N", help="print the program of this worker alone"
)
@click.option("--explain", is_flag=True, help="print no programs")
@timing.picture_options
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
    case = userfile.load(model)
    modules = options["modules"]
    with userfile.quiet_torch(), userfile.blamed(case.file, "the model raised"):
        found = make_plan(
            case.model,
            chosen,
            *case.args,
            stages="auto" if modules is None else modules.split(","),
            carry=options["carry"],
            memory_limit=options["memory_limit"],
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
    step = simulate_stages(found.schedule, found.stages, durations=None, transfer=None)
    timing.draw(step, options, unit="s")


@click.command(name="table1")
@click.pass_context
def check_table1(ctx: click.Context) -> None:
    """Formulas of latency and memory beside simulations.

    Table 1 of github.com/a-rahimi/parallel-training, with the formulas of it that hold
    in other words: = is equal, "within" a bound, "more" than what is said to be one.
    Exits with code 1 if a row is wrong.
    """
    click.echo(table1.text())
    ctx.exit(not all(row.holds for row in table1.rows()))


@click.command(name="demo")
@click.option(
    "--schedule",
    type=choice(demo.SCHEDULES),
    default="lpp",
    help=f"one of {', '.join(demo.SCHEDULES)}",
)
@click.option(
    "--workers",
    type=count,
    default=os.environ.get("WORLD_SIZE", "4"),
    help="threads, or ranks under torchrun",
)
@click.option(
    "--microbatches",
    type=count,
    default=8,
    help=f"equal parts of a batch of {demo.BATCH}",
)
@click.option("--steps", type=count, default=160, help="of the optimizer")
@click.option(
    "--device", type=choice(("cpu", "cuda")), default="cpu", help="cpu or cuda"
)
def train(**options: Any) -> None:
    """Train two transformer encoders by a schedule.

    They tell whether a docstring belongs to a function, on Python's own source.
    Workers are threads, or ranks under torchrun --nproc-per-node W -m fxsched demo.
    """
    demo.demo(**options)
