"""Encoders whose work varies, beside a trunk: a plan for each shape, or one for all.

Blocks sleep, as those of trunk_sleep; an encoder's as long as its samples have images.
How many is drawn for each batch, or for each microbatch, whose samples are padded then
to the most of the batch. There is a plan for each shape, which takes padding for work:
on workers of its own, though weights stay where the first plan put them, or on those of
the mean's plan. There is one for the mean, whose workers keep to its order; and one for
the mean with order="dynamic", whose workers take the smallest n that is ready.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import networkx as nx
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

from fxsched import Schedule, schedules
from fxsched.ir.request import Order

from .measure import Contestant, check, measure
from .naps import calibrate
from .sleep import Inputs, gradients
from .sleepers import WIDTH
from .trunk_sleep import BRANCHES, CLOSE, ROWS, ours
from .varied_naps import Album

IMAGES = (1, 1, 2, 8)  # of a sample
MEAN = 3
Drawn = Literal["batch", "microbatch"]


class Plans(NamedTuple):
    """each: a plan for each shape, else one for the mean; placed: with the mean's w."""

    name: str
    each: bool = False
    placed: bool = False
    order: Order = "static"


CONTESTANTS = (
    Plans("the mean, static"),
    Plans("the mean, dynamic", order="dynamic"),
    Plans("each shape, static", each=True),
    Plans("each shape, the mean's w", each=True, placed=True),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, default=4, choices=(4, 8), help="ranks (4)")
    add("--count", type=int, default=8, metavar="B", help="microbatches (8)")
    add("--schedule", default="nested", help="of fxsched's library (nested)")
    f = "milliseconds of a block's F of a mean microbatch, B takes twice as long (10)"
    add("--sleep", type=float, default=10.0, metavar="MS", help=f)
    add("--batches", type=int, default=5, help="each of images of its own (5)")
    add("--steps", type=int, default=4, help="with all batches, of each (4)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    calibrate()
    rows = [[drawn, *race(options, drawn)] for drawn in get_args(Drawn)]
    if not dist.get_rank():
        print("milliseconds of a step, medians; images drawn for each ..\n")
        headers = ["", *(each.name for each in CONTESTANTS), "work", "fastest"]
        print(tabulate(rows, headers, disable_numparse=True))
    dist.destroy_process_group()
    return 0


def race(options: argparse.Namespace, drawn: Drawn) -> list[str]:
    """Milliseconds of a step of each contestant, of a worker's share of the work, and
    the names of the fastest."""
    workers = dist.get_world_size()
    torch.manual_seed(0)
    seconds = options.sleep / 1e3 / ROWS
    sizes = BRANCHES, workers // BRANCHES, workers
    model = Album(*sizes, seconds, seconds / MEAN)
    batches = draw(drawn, options.count, options.batches)
    wanted = summed([gradients(model, batch) for batch in batches])
    schedule = schedules.LIBRARY[options.schedule](workers, options.count)
    mean, contestants = schedule, list[Contestant]()
    for name, each, placed, order in CONTESTANTS:
        shown = batches if each else list(map(even, batches))
        made = on_workers_of(mean, schedule) if placed else schedule
        contestant, other = ours(made, model, shown, order)
        contestant.name = name
        check(contestant, wanted)
        contestants.append(contestant)
        if not each:
            assert other.plan is not None
            mean = other.plan.schedule
    taken = measure(contestants, options.steps)
    steps = {
        each.name: 1e3 * statistics.median(taken[id(each)]) / len(batches)
        for each in contestants
    }
    images = sum(float(x.sum()) for batch in batches for x in batch[BRANCHES:])
    length = workers // BRANCHES
    of_trunk = workers * ROWS * options.count
    work = 3e3 * seconds * (images / len(batches) / MEAN * length + of_trunk)
    near = min(steps.values()) * (1 + CLOSE)
    fastest = "; ".join(name for name, time in steps.items() if time <= near)
    return [f"{time:.0f}" for time in (*steps.values(), work / workers)] + [fastest]


def draw(drawn: Drawn, count: int, batches: int) -> list[Inputs]:
    """Batches of as many microbatches: a value of each sample for each encoder, then
    which of its places have an image."""
    generator = random.Random(0)

    def images() -> Tensor:
        draws = count if drawn == "microbatch" else 1
        each = generator.choices(IMAGES, k=draws) * (count // draws)
        places = torch.arange(max(each))
        rows = torch.tensor(each).repeat_interleave(ROWS)
        return (places < rows[:, None]).float()

    return [
        (
            *(torch.randn(count * ROWS, WIDTH) for _ in range(BRANCHES)),
            *(images() for _ in range(BRANCHES)),
        )
        for _ in range(batches)
    ]


def even(batch: Inputs) -> Inputs:
    """The same images, in MEAN places: as much of one in each."""
    shares = (x.sum(1, keepdim=True) / MEAN for x in batch[BRANCHES:])
    return *batch[:BRANCHES], *(share.repeat(1, MEAN) for share in shares)


def summed(each: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([g[name] for g in each]).sum(0) for name in each[0]}


def on_workers_of(mean: Schedule, schedule: Schedule) -> Schedule:
    """The schedule, fitted to each shape's stages, with the w of the mean's."""

    def fit(stages: nx.DiGraph[int]) -> Schedule:
        return replace(schedule.fitted(stages), w=mean.w)

    return replace(schedule, fit=fit)
