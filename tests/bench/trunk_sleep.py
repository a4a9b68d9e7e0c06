"""Encoders beside a trunk that sleep: measured against simulated steps, on ranks.

A block is a stage, two encoders have as many as the trunk; 1F1B has two to a stage.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate

import fxsched
from fxsched import Job, Schedule, schedules
from fxsched.ir.request import Order

from .measure import Contestant, check, measure
from .naps import calibrate
from .sleep import Inputs, gradients
from .sleepers import WIDTH, Tree
from .trunk import NAMES

BRANCHES = 2
ROWS = 2  # of a microbatch
CLOSE = 0.02  # steps that differ by less may come in any order


class Row(NamedTuple):
    """Milliseconds of a step."""

    schedule: str
    simulated: float
    measured: float


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, default=4, choices=(4, 8), help="ranks (4)")
    add("--count", type=int, default=8, metavar="B", help="microbatches (8)")
    f = "milliseconds of a block's F of a microbatch, B takes twice as long (20)"
    add("--sleep", type=float, default=20.0, metavar="MS", help=f)
    add("--steps", type=int, default=10, help="of each contestant (10)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """1 if the measured order isn't the simulated one."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    calibrate()
    rows = sorted(race(options), key=lambda row: row.simulated)
    if not dist.get_rank():
        cells = [(r.schedule, f"{r.simulated:.0f}", f"{r.measured:.0f}") for r in rows]
        headers = ["milliseconds of a step", "simulated", "measured"]
        print(tabulate(cells, headers, disable_numparse=True))
    dist.destroy_process_group()
    swapped = (
        one.measured > other.measured
        for one, other in combinations(rows, 2)
        if other.simulated > one.simulated * (1 + CLOSE)
    )
    return int(any(swapped))


def race(options: argparse.Namespace) -> list[Row]:
    workers = dist.get_world_size()
    torch.manual_seed(0)
    seconds = options.sleep / 1e3 / ROWS
    model = Tree(BRANCHES, workers // BRANCHES, workers, seconds)
    rows = options.count * ROWS
    inputs = tuple(torch.randn(rows, WIDTH) for _ in range(BRANCHES))
    wanted, pairs = gradients(model, inputs), []
    for name in NAMES:
        schedule = schedules.LIBRARY[name](workers, options.count)
        contestant, backend = ours(schedule, model, [inputs])
        check(contestant, wanted)
        pairs.append((contestant, backend))
    taken = measure([contestant for contestant, _ in pairs], options.steps)
    return [
        Row(
            contestant.name,
            1e3 * simulated(backend, contestant.name, options.sleep / 1e3),
            1e3 * statistics.median(taken[id(contestant)]),
        )
        for contestant, backend in pairs
    ]


def ours(
    schedule: Schedule, model: Tree, batches: Sequence[Inputs], order: Order = "static"
) -> tuple[Contestant, fxsched.Backend]:
    """Its step takes all batches."""
    model = copy.deepcopy(model)
    name = schedule.name or ""
    each = 2 if name == "1f1b" else 1
    starts = [f"blocks.{s}" for s in range(each, len(model.blocks), each)]
    backend = fxsched.backend(schedule, starts, order=order)
    compiled: Any = torch.compile(model, backend=backend)

    def step() -> None:
        for inputs in batches:
            compiled(*inputs).backward()

    return Contestant(name, model, step), backend


def simulated(backend: fxsched.Backend, name: str, seconds: float) -> float:
    """With the sleeps, and transfers that take no time."""
    assert backend.plan is not None
    seconds *= 2 if name == "1f1b" else 1

    def times(job: Job) -> float:
        return seconds if str(job.direction) == "F" else 2 * seconds

    return backend.plan.simulate(times, transfer=0.0).latency
