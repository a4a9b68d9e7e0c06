"""More workers than cores: measured against simulated steps of stages that sleep.

Chains and trees of stages that sleep for a given time in F and B instead of computing,
with one and two stages a rank, against torch.distributed.pipelining on the same stages;
a tree is made a line for it.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
)

import fxsched
from fxsched import Schedule, schedules
from fxsched.simulator.timeline_comparison import compare_timelines

from .measure import Contestant, check, measure, slowest
from .naps import calibrate
from .sleepers import WIDTH, Stretch, Tree, loss

BRANCHES = {"chain": 1, "tree": 3}
Inputs = tuple[Tensor, ...]


class Row(NamedTuple):
    """One of fxsched's schedules; times are milliseconds of a step."""

    shape: str
    workers: int
    schedule: str
    simulated: float  # with the given sleeps, transfers taking no time
    estimated: float  # transfers as long as they are estimated to take
    measured: float
    off: float  # measured above simulated, as a share of it
    peer: str
    peer_simulated: float
    peer_measured: float
    ratio: float  # measured to the peer's: the median over rounds


def run(options: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    dist.barrier()
    late = slowest(list(calibrate().values())).tolist()
    if not dist.get_rank():
        f, b = (1e3 * x for x in late)
        print(f"sleeps are shorter by what a call costs: F {f:.2f} ms, B {b:.2f} ms\n")
    rows = [row for shape in options.shapes for row in race(options, shape)]
    if not dist.get_rank():
        print(table(rows))
        for shape in options.shapes:
            print(best([row for row in rows if row.shape == shape]))
        if options.json is not None:
            given = vars(options).items()
            known = {k: v for k, v in given if k not in ("json", "run", "check")}
            result = {"options": known, "rows": [row._asdict() for row in rows]}
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


def tree(shape: str, stages: int, seconds: float) -> Tree:
    """One block a stage; seconds: of each block's F, for one row."""
    branches = BRANCHES[shape]
    length = stages if branches == 1 else stages // (branches + 1)
    return Tree(branches, length, stages - branches * length, seconds)


def race(options: argparse.Namespace, shape: str) -> Iterator[Row]:
    """fxsched's schedules and the peer's, in turns."""
    workers = dist.get_world_size()
    count = options.microbatches or 2 * workers
    forward = options.forward / 1e3  # of a worker, for one microbatch
    pairs = []
    for per_rank in (1, 2):
        torch.manual_seed(0)
        model = tree(shape, per_rank * workers, forward / per_rank / options.rows)
        rows = count * options.rows
        inputs = tuple(torch.randn(rows, WIDTH) for _ in range(model.branches))
        wanted = gradients(model, inputs)
        mine, backend = ours(shape, model, inputs, count)
        theirs = peer(model, inputs, count)
        for each in (mine, theirs):
            check(each, wanted)
        if options.compare:
            report = compared(shape, model, inputs, count, forward / per_rank)
            if not dist.get_rank():
                print(report)
        pairs.append((mine, backend, theirs))
    taken = measure([c for a, _, b in pairs for c in (a, b)], options.steps)
    for per_rank, (mine, backend, theirs) in enumerate(pairs, 1):
        assert backend.plan is not None
        times = sleeps(forward / per_rank)
        simulated = backend.plan.simulate(times, transfer=0.0).latency
        line = of_a_line(workers, count, per_rank * workers)
        measured, peers = taken[id(mine)], taken[id(theirs)]
        yield Row(
            shape,
            workers,
            mine.name,
            1e3 * simulated,
            1e3 * backend.plan.simulate(times).latency,
            1e3 * statistics.median(measured),
            statistics.median(measured) / simulated - 1,
            theirs.name,
            1e3 * fxsched.simulate(line, durations=times).latency,
            1e3 * statistics.median(peers),
            statistics.median(a / b for a, b in zip(measured, peers, strict=True)),
        )


def sleeps(forward: float) -> dict[str, float]:
    return {"F": forward, "B": 2 * forward}


def gradients(model: Tree, inputs: Inputs) -> dict[str, Tensor]:
    """Eager PyTorch's, without the sleep."""
    awake = copy.deepcopy(model)
    for block in awake.blocks:
        block.seconds = 0.0
    awake(*inputs).backward()
    return {
        name: parameter.grad
        for name, parameter in awake.named_parameters()
        if parameter.grad is not None
    }


def of_a_line(workers: int, count: int, stages: int) -> Schedule:
    if stages == workers:
        return schedules.one_f_one_b(workers, count)
    return schedules.interleaved(workers, count, stages)


def ours(
    shape: str, model: Tree, inputs: Inputs, count: int, record: bool = False
) -> tuple[Contestant, fxsched.Backend]:
    model, stages = copy.deepcopy(model), len(model.blocks)
    workers = dist.get_world_size()
    if shape == "chain":
        schedule = of_a_line(workers, count, stages)
    else:
        schedule = schedules.graph(workers, count)
    names = [f"blocks.{s}" for s in range(1, stages)]
    backend = fxsched.backend(schedule, names, profile=record or None)
    compiled: Any = torch.compile(model, backend=backend)
    name = f"{schedule.name}, {stages // workers} a rank"
    return Contestant(name, model, lambda: compiled(*inputs).backward()), backend


def peer(model: Tree, inputs: Inputs, count: int) -> Contestant:
    """The blocks in a row: with a stage for each, any order of branches is as good."""
    model, stages = copy.deepcopy(model), len(model.blocks)
    rank, workers = dist.get_rank(), dist.get_world_size()
    here = [
        PipelineStage(Stretch(model, s), s, stages, torch.device("cpu"))
        for s in range(rank, stages, workers)
    ]
    kind: Any = Schedule1F1B if stages == workers else ScheduleInterleaved1F1B
    schedule = kind(
        here[0] if stages == workers else here,
        count,
        loss_fn=lambda out, _: loss(out) / count,
        scale_grads=False,
    )
    named = {f"x{i}": x for i, x in enumerate(inputs)}
    target = inputs[0] if rank == workers - 1 else None  # without one it has no loss

    def step() -> None:
        schedule.step(**named, target=target, return_outputs=False)

    return Contestant(kind.__name__.removeprefix("Schedule"), model, step)


def compared(
    shape: str, model: Tree, inputs: Inputs, count: int, forward: float
) -> str:
    """Where a recorded step and the simulated one part."""
    contestant, backend = ours(shape, model, inputs, count, record=True)
    measure([contestant], 1)
    assert backend.plan is not None
    predicted = backend.plan.simulate(sleeps(forward), transfer=0.0).timeline
    tables = compare_timelines(predicted, backend.timeline)
    return f"{shape}, {contestant.name}\n\n{tables}\n"


def table(rows: list[Row]) -> str:
    headers = "shape|W|fxsched|simulated|with transfers|measured|off|peer"
    headers += "|simulated|measured|ours to it"
    cells = [
        (
            row.shape,
            row.workers,
            row.schedule,
            *(f"{t:.0f}" for t in (row.simulated, row.estimated, row.measured)),
            f"{row.off:+.1%}",
            row.peer,
            *(f"{t:.0f}" for t in (row.peer_simulated, row.peer_measured)),
            f"{row.ratio:.3f}",
        )
        for row in rows
    ]
    align = ("left", "right", "left", *("right",) * 4, "left", *("right",) * 3)
    found = tabulate(cells, headers.split("|"), colalign=align, disable_numparse=True)
    return f"milliseconds of a step, medians\n\n{found}"


def best(rows: list[Row]) -> str:
    """The fastest of fxsched's schedules of one shape to each of the peer's."""
    fastest = min(rows, key=lambda row: row.measured)
    others = [f"{fastest.measured / row.peer_measured:.3f} {row.peer}" for row in rows]
    return f"\n{fastest.shape}: {fastest.schedule} is {', '.join(others)}"
