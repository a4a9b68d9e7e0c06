"""What simulating commands share: options of times and links, pictures of a step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import click
import networkx as nx
from click.core import ParameterSource

from ..clock.network import Link, Network, Wires
from ..draw import chrome
from ..draw.diagram import Diagram
from ..draw.memory_table import WorkerMemory, memory_tables
from ..draw.tables import wrapped
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..simulator.simulate import Simulation
from ..simulator.simulate import simulate as run
from .option_types import NUMBER, POSITION, all_of, file_of
from .options import flag

# A diagram of more workers is printed only if asked for.
ROWS = 16


time_options = all_of(
    click.option(
        "--forward", type=NUMBER, default=1.0, help="time of F (forward) of one stage"
    ),
    click.option(
        "--backward",
        type=NUMBER,
        default=2.0,
        help="time of B (backward) of one stage, without W if --weight is given",
    ),
    click.option(
        "--weight",
        type=NUMBER,
        help="time of W (weight gradients) of one stage  [default: half of --backward, "
        "and B takes the other half]",
    ),
    click.option(
        "--transfer", type=NUMBER, default=0.0, help="time of a message between workers"
    ),
)
update_option = click.option(
    "--update",
    type=NUMBER,
    help="time of U (update), a step of the optimizer on one stage  [default: 0]",
)
link_options = all_of(
    click.option(
        "--bandwidth",
        type=NUMBER,
        help="bytes that a link between two workers moves in a unit of time; a link "
        "moves one message after the other; takes the place of --transfer",
    ),
    click.option(
        "--latency",
        type=NUMBER,
        help="time that a message takes besides the time for its bytes; needs "
        "--bandwidth",
    ),
    click.option(
        "--network",
        metavar="FILE",
        help="what messages go through: a file that fxsched network wrote; times are "
        "then in seconds; takes the place of --bandwidth and --latency",
    ),
    click.option(
        "--message-bytes",
        type=NUMBER,
        help="bytes of each message between stages; needs --bandwidth or --network",
    ),
    click.option(
        "--weight-bytes", type=NUMBER, help="bytes of the weights of each stage"
    ),
    click.option(
        "--sums",
        type=POSITION,
        metavar="N",
        help="how many sums the shards of each stage add up in F, and as many in B  "
        "[default: sums take no time]",
    ),
    click.option(
        "--sum-bytes", type=NUMBER, help="bytes of a shard's summand in each sum"
    ),
)
memory_options = all_of(
    click.option(
        "--activation-bytes",
        type=NUMBER,
        help="bytes of the activations that a stage holds for one microbatch, from F "
        "to B; adds tables of what workers hold",
    ),
    click.option(
        "--state",
        type=NUMBER,
        help="bytes of the optimizer's state for each byte of --weight-bytes: 2 for "
        "Adam, 1 for SGD with momentum; adds tables of what workers hold",
    ),
)
prefetch_option = click.option(
    "--prefetch",
    type=POSITION,
    metavar="N",
    help="how many jobs before a worker needs them it asks for weights that other "
    "workers keep  [default: fetches take no time]",
)
joint_option = click.option(
    "--joint",
    type=POSITION,
    multiple=True,
    metavar="STAGE",
    help="number of a global-batch stage: rows of all microbatches meet in it, and it "
    "has one job for each direction; may be given several times",
)
picture_options = all_of(
    click.option(
        "--text/--no-text",
        default=None,
        help="print a diagram of the step in letters  [default: if the diagram is "
        "small]",
    ),
    click.option(
        "--svg",
        type=file_of(".svg"),
        help="write a picture of the step to this SVG file",
    ),
    click.option(
        "--html",
        type=file_of(".html", ".htm"),
        help="write the step to this file as an HTML page, to explore in a browser",
    ),
    click.option(
        "--trace",
        type=file_of(".json"),
        help="write the step to this file as JSON, for Perfetto",
    ),
)


MODEL = "path/to/model.py:make or package.module:make"
ESTIMATED = ("forward", "backward", "weight", "update", "transfer", "joint")
SIZES = (
    "bandwidth",
    "latency",
    "message_bytes",
    "weight_bytes",
    "sums",
    "sum_bytes",
)


def refuse_estimated(ctx: click.Context) -> None:
    """Raises PlanError for options of what --model says itself."""
    for name in (*ESTIMATED, *SIZES):
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise PlanError(
                f"{flag(name)} doesn't go with --model, since fxsched estimates it "
                "from the model; leave it out"
            )


def durations(options: Mapping[str, Any]) -> dict[str, float]:
    """Of F, B and, if they are given, W and U."""
    times = {"F": options["forward"], "B": options["backward"]}
    times |= {"W": options["weight"], "U": options.get("update")}
    return {kind: time for kind, time in times.items() if time is not None}


def simulate(
    schedule: Schedule, options: Mapping[str, Any], scale: float = 1.0
) -> Simulation:
    """A step by the options of times and links, of a chain of equal stages.

    scale: how long a stage takes, in those that the options are about.
    """
    if options.get("sums") and schedule.shards == 1:
        raise PlanError(
            "--sums needs --shards, since shards add up the sums; give --shards 2 or "
            "more"
        )
    if options.get("sum_bytes") is not None and not options.get("sums"):
        raise PlanError("--sum-bytes needs --sums; give how many sums there are")
    return run(
        schedule,
        _chain(schedule.stages or schedule.workers, options, scale),
        {kind: time * scale for kind, time in durations(options).items()},
        transfer(options),
        options["prefetch"],
        options.get("joint", ()),
        options.get("sums") or 0,
        options.get("sum_bytes") or 0.0,
    )


def _chain(count: int, options: Mapping[str, Any], scale: float) -> nx.DiGraph[int]:
    weights = scale * (options.get("weight_bytes") or 0.0)
    sizes = {
        "weights": 2 * weights,  # and their gradients
        "held": scale * (options.get("activation_bytes") or 0.0),
        "state": weights * (options.get("state") or 0.0),
    }
    stages: nx.DiGraph[int] = nx.DiGraph()
    stages.add_nodes_from(range(count), **{k: v for k, v in sizes.items() if v})
    nx.add_path(stages, range(count), bytes=options.get("message_bytes") or 0.0)
    return stages


def shows_memory(options: Mapping[str, Any]) -> bool:
    """Whether what workers hold is asked for."""
    wanted = ("activation_bytes", "state")
    return any(options.get(name) is not None for name in wanted)


def transfer(options: Mapping[str, Any]) -> float | Wires:
    """How long messages take. Raises PlanError for options that don't go together."""
    bandwidth = options.get("bandwidth")
    weights, memory = options.get("weight_bytes") is not None, shows_memory(options)
    if options.get("state") is not None and not weights:
        raise PlanError(
            "--state needs --weight-bytes, since it is a number for each of these "
            "bytes; give both"
        )
    if weights and options["prefetch"] is None and not memory:
        held = ", or --state, to see what workers hold" if "state" in options else ""
        raise PlanError(
            "--weight-bytes needs --prefetch, since fetches take no time without it; "
            f"give --prefetch 1{held}"
        )
    if options.get("network") is not None:
        for name in ("transfer", "bandwidth", "latency"):
            if options.get(name):
                raise PlanError(
                    f"--network and {flag(name)} exclude each other; give one"
                )
        return Network.load(options["network"])
    if bandwidth is None:
        for name in ("latency", "message_bytes", "weight_bytes", "sum_bytes"):
            if options.get(name) is not None and not (memory and name[0] == "w"):
                raise PlanError(
                    f"{flag(name)} needs --bandwidth or --network; give both"
                )
        if options["prefetch"] is not None and not options["transfer"]:
            link = ", --bandwidth or --network" * ("bandwidth" in options)
            raise PlanError(
                f"--prefetch needs --transfer{link}; give how long weights take"
            )
        return float(options["transfer"])
    if options["transfer"]:
        raise PlanError("--transfer and --bandwidth exclude each other; give one")
    if not bandwidth:
        raise PlanError("--bandwidth 0 moves nothing; give more than 0")
    return Link(bandwidth, options["latency"] or 0.0)


def show(schedule: Schedule, options: Mapping[str, Any], count: int) -> None:
    """Prints what a simulated step comes to, with its pictures.

    count: into how many stages a model is cut that has stages of the given times.
    """
    stages = schedule.stages or count
    simulation = simulate(schedule, options, count / stages)
    click.echo(simulation.table())
    if stages != count:
        said = (
            f"--forward and the other times are of one of {count} stages; each of the "
            f"{stages} stages here takes {count / stages:.4g} of them, and activations "
            "are of these stages"
        )
        click.echo(f"\n{wrapped([said])}")
    if shows_memory(options):
        memory = WorkerMemory(simulation.memory, True, knows_state=True)
        click.echo("\n" + "\n".join(memory_tables(memory)))
    show_pictures(simulation, options, simulation.diagram)


def show_pictures(
    simulation: Simulation, options: Mapping[str, Any], draw: Callable[[], Diagram]
) -> None:
    """Prints and writes the pictures that were asked for, which draw() makes."""
    draw, text, large = cache(draw), options["text"], ""
    if text is None:
        workers, rest = len(simulation.workers), "--text prints it, --html writes it"
        if workers > ROWS:
            large = f"The diagram has {workers} rows: {rest}."
        elif hint := draw().unseen():
            large = f"Jobs of the diagram are shorter than a character: {rest}. {hint}"
        text = not large
    files = any(options[kind] for kind in ("svg", "html", "trace"))
    if large and not files:
        click.echo(f"\n{wrapped([large])}")
    if not text and not files:
        return
    diagram = draw()
    if text:
        click.echo(f"\n{terminal_text(diagram)}")
    timelines = {str(simulation.schedule): simulation.timeline}
    # a unit of time that isn't a second is shown as a millisecond
    scale = 1e6 if diagram.unit == "s" else 1e3
    writers: dict[str, Callable[[Path], object]] = {
        "svg": lambda path: path.write_text(diagram.svg(), "utf-8"),
        "html": lambda path: path.write_text(diagram.html(), "utf-8"),
        "trace": lambda path: chrome.write_trace(path, timelines, scale),
    }
    for kind, write in writers.items():
        if path := options[kind]:
            try:
                write(path)
            except OSError as error:
                said = f"{flag(kind)}: {path} can't be written: {error.strerror}"
                raise PlanError(said) from error
            click.echo(f"wrote {path}")


def terminal_text(diagram: Diagram) -> str:
    """A picture for the terminal, as wide as it is, and in colours unless refused."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return diagram.text(color=terminal and "NO_COLOR" not in os.environ)
