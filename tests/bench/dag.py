"""fxsched on a graph of stages, against pipelines of the same model made a line.

Every contestant has a copy of one model and takes its steps in turn with the others,
in the same processes. A step lasts as long as on its slowest rank; the optimizer is
left out. Before it is timed, a contestant's gradients must be eager PyTorch's.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import fxsched
from fxsched.schedules import LIBRARY

from .measure import RARELY, Batch, Contestant, check, measure
from .pipelining import Line, best_cuts, peer
from .towers import Sizes, Stretch, TwoTowers, line, sample


class Row(NamedTuple):
    """One contestant's result; seconds are of a step on the slowest rank."""

    microbatches: int
    contestant: str
    median: float
    fastest: float
    ratio: float  # to the best peer: the median over rounds
    limit: float  # work / workers over the median: 1 if no worker ever waits
    error: float
    split: str
    seconds: list[float]


def ours(
    name: str, options: argparse.Namespace, model: TwoTowers, batch: Batch, count: int
) -> Contestant:
    model = copy.deepcopy(model)
    if name not in LIBRARY:
        raise SystemExit(f"--schedule {name}: give one of {', '.join(LIBRARY)}")
    schedule = LIBRARY[name](workers=dist.get_world_size(), microbatches=count)
    backend = fxsched.backend(schedule, order=options.order)
    compiled = torch.compile(model, backend=backend)

    def step() -> None:
        compiled(*batch).backward()

    step()
    assert backend.plan is not None
    if options.plan and not dist.get_rank():
        print(backend.plan)
    split = [", ".join(m) for _, m in backend.plan.stages.nodes(data="modules")]
    return Contestant(f"fxsched {name}", model, step, " | ".join(split))


def eager(model: TwoTowers, batch: Batch, count: int) -> Contestant:
    model = copy.deepcopy(model)
    microbatches = list(zip(*(x.chunk(count) for x in batch), strict=True))

    def step() -> None:
        for microbatch in microbatches:
            (model(*microbatch) / count).backward()

    return Contestant("eager / workers", model, step, every=RARELY)


def compare(options: argparse.Namespace, sizes: Sizes, count: int) -> Iterator[Row]:
    """Rows of all contestants for one number of microbatches."""
    torch.manual_seed(0)
    model, batch = TwoTowers(sizes), sample(sizes)
    workers = dist.get_world_size()
    reference = eager(model, batch, count)
    reference.step()
    wanted = {
        name: parameter.grad
        for name, parameter in reference.model.named_parameters()
        if parameter.grad is not None
    }
    named = options.schedule or ["graph"]
    # 1F1B refuses fewer microbatches than stages; GPipe is then the same order
    plain = Schedule1F1B if count >= workers else ScheduleGPipe

    def make() -> Line:
        own, (a, b, target) = copy.deepcopy(model), batch
        return Line(own, line(own), Stretch, {"a": a, "b": b}, target, F.mse_loss)

    peers = []
    for kind in (plain, ScheduleInterleaved1F1B):
        cuts = best_cuts(kind, make, count, options.tries)
        peers.append(peer(kind, make(), count, cuts)[0])
    contestants = [ours(name, options, model, batch, count) for name in named] + peers
    for each in contestants:
        check(each, wanted)
    taken = measure([*contestants, reference], options.steps)
    medians = {key: statistics.median(seconds) for key, seconds in taken.items()}
    best = min(peers, key=lambda each: medians[id(each)])
    for each in [*contestants, reference]:
        seconds = taken[id(each)]
        if each is reference:
            seconds = [s / workers for s in seconds]
        others = taken[id(best)][:: each.every]
        yield Row(
            count,
            each.name,
            statistics.median(seconds),
            min(seconds),
            statistics.median(
                mine / other for mine, other in zip(seconds, others, strict=True)
            ),
            medians[id(reference)] / workers / statistics.median(seconds),
            each.error,
            each.split,
            seconds,
        )


def run(options: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    sizes = Sizes(
        options.width,
        options.length,
        options.batch,
        options.vocabulary,
        layers=tuple(options.layers),
        sleep=options.sleep,
    )
    rows: list[Row] = []
    for count in options.microbatches:
        rows += compare(options, sizes, count)
        if not dist.get_rank():
            print(f"B = {count} done", flush=True)
    if not dist.get_rank():
        print(table(rows))
        for row in rows:
            if row.split:
                print(f"B = {row.microbatches}, {row.contestant}: {row.split}")
        if options.json is not None:
            known = {k: v for k, v in vars(options).items() if k != "json"}
            result = {"options": known, "rows": [row._asdict() for row in rows]}
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


def table(rows: Sequence[Row]) -> str:
    return tabulate(
        [
            (
                row.microbatches,
                row.contestant,
                f"{1000 * row.median:.0f}",
                f"{1000 * row.fastest:.0f}",
                f"{row.ratio:.3f}",
                f"{row.limit:.0%}",
                f"{row.error:.0e}",
            )
            for row in rows
        ],
        ["B", "contestant", "ms", "fastest", "/ best peer", "busy", "error"],
        colalign=("right", "left", *("right",) * 5),
        disable_numparse=True,
    )
