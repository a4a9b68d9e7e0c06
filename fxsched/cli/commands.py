"""The commands that need no model, and the demo."""

from __future__ import annotations

import os
from typing import Any

import click

from ..schedules import LIBRARY
from . import demo, simulate_options, table1
from .compare_command import lineup
from .option_types import choice, choices, count
from .options import build, given, schedule_option, schedule_options


@click.command()
@schedule_option
@schedule_options
@simulate_options.time_options
@simulate_options.link_options
@simulate_options.prefetch_option
@simulate_options.picture_options
def simulate(schedule: str, **options: Any) -> None:
    """A schedule's step on a virtual clock.

    The model is a chain of equal stages; --forward and the like are times of one.
    """
    simulate_options.show(
        simulate_options.simulate(build(schedule, given(options)), options), options
    )


@click.command()
@click.option(
    "--schedules",
    type=choices(LIBRARY),
    help="which, with commas between  [default: all that can be built]",
)
@schedule_options
@simulate_options.time_options
@simulate_options.link_options
@simulate_options.prefetch_option
def compare(schedules: tuple[str, ...] | None, **options: Any) -> None:
    """Simulated steps of several schedules side by side.

    --forward, --backward and --weight are of one stage of a model that is cut into
    --stages, or one for each worker. Where a schedule cuts it into more, they are
    shorter, and activations and weights, the most on any worker, are counted in stages
    of that size. Fetches of weights and other messages are those of all workers; the
    span bubble is that of steps that follow each other without a gap.
    """
    click.echo(lineup(schedules or tuple(LIBRARY), options))


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
