"""fxsched and PyTorch on GPUs: three pipelines, DDP and FSDP2, over microbatches.

Each rank has a GPU. Pipelines of both have the same stages: blocks in equal parts.
Contestants take their steps in turn; a step ends when the rank's GPU is done, and lasts
as long as on its slowest rank. The optimizer is left out. Before it is timed, a
contestant's gradients must be eager PyTorch's. Of fxsched, another backend records the
timeline of some steps: how long the busiest rank computes, and how long the same jobs
take if messages take no time. `--device cpu` runs all of it on the CPU, with gloo.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import fxsched
from fxsched.ir.request import Capture
from fxsched.schedules import LIBRARY

from .language import Setup
from .measure import RARELY, Contestant, check, measure
from .pipelining import peer
from .rivals import ddp, fsdp

TOLERANCE = 1e-4  # of gradients: a GPU adds up in another order
PEERS: Any = MappingProxyType(  # by fxsched's schedule, with its stages of a rank
    {
        "1f1b": (Schedule1F1B, 1),
        "interleaved": (ScheduleInterleaved1F1B, 2),
        "zb_v": (ScheduleInterleavedZeroBubble, 2),
        "ddp": (ddp, 0),
        "fsdp": (lambda setup: fsdp(setup, "torch-fsdp", reduce_each=True), 0),
    }
)


class Recorded(NamedTuple):
    """Seconds of a step that kept its timeline.

    busiest: of the jobs of the rank that computes longest. unsent: of the step, if
        messages took no time.
    """

    step: float
    busiest: float
    unsent: float


class Row(NamedTuple):
    """A schedule and its peer: seconds of their steps, and of recorded ones."""

    schedule: str
    microbatches: int
    seconds: list[float]
    peer: str
    peers: list[float]
    recorded: list[Recorded]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="(cuda)")
    add("--workers", type=int, default=2, help="ranks, each with a GPU (2)")
    sweep = [4, 8, 16]
    add("--microbatches", type=int, nargs="+", default=sweep, metavar="B")
    add("--layers", type=int, default=16, help="blocks of the model (16)")
    add("--width", type=int, default=1024, help="(1024)")
    add("--length", type=int, default=512, help="tokens of a sequence (512)")
    add("--vocabulary", type=int, default=32768, help="(32768)")
    add("--batch", type=int, default=32, help="(32)")
    add("--steps", type=int, default=20, help="of each contestant (20)")
    add("--only", nargs="+", choices=PEERS, default=[*PEERS], metavar="NAME")
    add("--capture", choices=("graphs",), help="as for fxsched.backend")
    parser.set_defaults(check=_check, each=each, run=run, compiled=False)


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.layers < 2 * options.workers:
        parser.error("--layers: give two blocks for each worker, or more")
    for count in options.microbatches:
        if count < 1 or count % options.workers or options.batch % count:
            parser.error("--microbatches: multiples of --workers that divide --batch")


def each(
    options: argparse.Namespace, launch: Callable[[int, Sequence[str]], int]
) -> int:
    """Starts the ranks, if there are GPUs for them."""
    found = torch.cuda.device_count()
    if options.device == "cuda" and found < options.workers:
        print(
            f"gpu: --workers {options.workers} needs as many GPUs, and this machine "
            f"has {found}; --device cpu runs the command without"
        )
        return 0
    return launch(options.workers, sys.argv[1:])


def run(options: argparse.Namespace) -> int:
    """On each rank."""
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    torch.set_num_threads(1)
    rows = []
    for count in options.microbatches:
        setup = Setup.of(options)
        setup = replace(setup, microbatches=count, device=device)
        rows += compare(setup, options)
        if not dist.get_rank():
            print(f"{count} microbatches done", flush=True)
    if not dist.get_rank():
        print(table(rows))
    dist.destroy_process_group()
    return 0


def compare(setup: Setup, options: argparse.Namespace) -> list[Row]:
    """Checks and times all contestants."""
    wanted, racers, twins = setup.gradients(), list[Contestant](), list[Contestant]()
    recorded: dict[str, list[Recorded]] = {}
    for name in options.only:
        recorded[name] = []
        racers.append(ours(name, setup, options.capture))
        twins.append(ours(name, setup, options.capture, recorded[name]))
        racers.append(theirs(name, setup))
    for each in (*racers, *twins):
        check(each, wanted, TOLERANCE)
    for timelines in recorded.values():
        timelines.clear()  # of the first step, which plans
    taken = measure([*racers, *twins], options.steps)
    pairs = zip(options.only, racers[::2], racers[1::2], strict=True)
    return [
        Row(
            name,
            setup.microbatches,
            taken[id(mine)],
            other.name,
            taken[id(other)],
            recorded[name],
        )
        for name, mine, other in pairs
    ]


def cuts(setup: Setup, per_rank: int) -> list[int]:
    """Where the line of embedding, blocks and head is cut, for equal parts."""
    stages = per_rank * dist.get_world_size()
    return [1 + s * setup.config.layers // stages for s in range(1, stages)]


def ours(
    name: str,
    setup: Setup,
    capture: Capture | None,
    recorded: list[Recorded] | None = None,
) -> Contestant:
    """fxsched's; with a list, it records the timelines of its steps there."""
    model, workers = setup.model(), dist.get_world_size()
    schedule = LIBRARY[name](workers, setup.microbatches)
    per_rank = PEERS[name][1]
    places = cuts(setup, per_rank) if per_rank else range(1, setup.config.layers)
    stages = [f"blocks.{place - bool(per_rank)}" for place in places]
    profile = None if recorded is None else True
    backend = fxsched.backend(schedule, stages, capture=capture, profile=profile)
    compiled: Any = torch.compile(model, backend=backend)

    def step() -> None:
        compiled(*setup.inputs).backward()
        if recorded is not None:
            recorded.append(figures(backend))

    contestant = Contestant(name, model, until_done(step, setup.device))
    contestant.every = 1 if recorded is None else RARELY
    return contestant


def figures(backend: fxsched.Backend) -> Recorded:
    """Of the step that ran last."""
    plan, events = backend.plan, backend.timeline
    assert plan is not None
    busy = dict.fromkeys(range(plan.schedule.workers), 0.0)
    for event in events:
        busy[event.worker] += event.end - event.start
    taken = {event.job: event.end - event.start for event in events}
    whole = max(e.end for e in events) - min(e.start for e in events)
    unsent = plan.simulate(taken.__getitem__, transfer=0.0).latency
    return Recorded(whole, max(busy.values()), unsent)


def theirs(name: str, setup: Setup) -> Contestant:
    """PyTorch's."""
    kind, per_rank = PEERS[name]
    if not per_rank:
        contestant: Contestant = kind(setup)
    else:
        places = cuts(setup, per_rank)
        contestant, _ = peer(kind, setup.line(), setup.microbatches, places)
        contestant.name = kind.__name__
    contestant.step = until_done(contestant.step, setup.device)
    return contestant


def until_done(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A step that ends when the device is done."""

    def whole() -> None:
        step()
        if device.type != "cpu":
            torch.cuda.synchronize(device)

    return whole


def table(rows: Sequence[Row]) -> str:
    """Medians, in milliseconds; ratios are taken in each round."""
    cells = []
    for row in rows:
        ratios = (a / b for a, b in zip(row.seconds, row.peers, strict=True))
        step, busiest, unsent = (
            statistics.median(times) for times in zip(*row.recorded, strict=True)
        )
        times = (statistics.median(row.seconds), statistics.median(row.peers))
        cells.append(
            (
                row.microbatches,
                row.schedule,
                row.peer,
                *(f"{1e3 * seconds:.1f}" for seconds in times),
                f"{statistics.median(ratios):.3f}",
                *(f"{1e3 * seconds:.1f}" for seconds in (step, busiest, unsent)),
                f"{step / unsent - 1:+.1%}",
            )
        )
    heads = "B|fxsched|PyTorch|ms|its ms|ratio|recorded ms|busiest rank"
    heads += "|without messages|messages add"
    return tabulate(cells, heads.split("|"), "pipe", disable_numparse=True)
