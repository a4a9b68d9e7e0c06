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
from fxsched.compare import compare

from .measure import Contestant, check, measure
from .sleepers import WIDTH, Stretch, Tree, loss

BRANCHES = {"chain": 1, "tree": 3}
Inputs = tuple[Tensor, ...]
Times = dict[str, float]  # of F and B, in seconds


class Row(NamedTuple):
    """One of fxsched's schedules; times are milliseconds of a step."""

    shape: str
    workers: int
    schedule: str
    stages: int
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
    rows = [row for shape in options.shapes for row in race(options, shape)]
    if not dist.get_rank():
        print(table(rows))
        if options.json is not None:
            known = {k: v for k, v in vars(options).items() if k not in ("json", "run")}
            result = {"options": known, "rows": [row._asdict() for row in rows]}
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


def tree(shape: str, workers: int, seconds: float) -> Tree:
    """Two blocks a worker; seconds: of each block's F, for one row."""
    blocks = 2 * workers
    if shape == "chain":
        return Tree(1, blocks, 0, seconds)
    length = blocks // (BRANCHES[shape] + 1)
    return Tree(BRANCHES[shape], length, blocks - BRANCHES[shape] * length, seconds)


def race(options: argparse.Namespace, shape: str) -> Iterator[Row]:
    """fxsched's schedules and the peer's on one model, in turns."""
    workers = dist.get_world_size()
    count = options.microbatches or 2 * workers
    forward = options.forward / 1e3  # of a worker, for one microbatch
    torch.manual_seed(0)
    model = tree(shape, workers, forward / 2 / options.rows)
    rows = count * options.rows
    inputs = tuple(torch.randn(rows, WIDTH) for _ in range(model.branches))
    wanted = gradients(model, inputs)
    pairs = []
    for per_rank in (1, 2):
        mine, backend = ours(shape, model, inputs, count, per_rank)
        pairs.append((per_rank, mine, backend, peer(model, inputs, count, per_rank)))
    contestants = [each for _, mine, _, theirs in pairs for each in (mine, theirs)]
    for each in contestants:
        check(each, wanted)
    taken = measure(contestants, options.steps)
    for per_rank, mine, backend, theirs in pairs:
        assert backend.plan is not None
        times = {"F": forward / per_rank, "B": 2 * forward / per_rank}
        simulated = backend.plan.simulate(times, transfer=0.0).latency
        line = fxsched.simulate(of_a_line(workers, count, per_rank), durations=times)
        measured, peers = taken[id(mine)], taken[id(theirs)]
        yield Row(
            shape,
            workers,
            mine.name,
            per_rank * workers,
            1e3 * simulated,
            1e3 * backend.plan.simulate(times).latency,
            1e3 * statistics.median(measured),
            statistics.median(measured) / simulated - 1,
            theirs.name,
            1e3 * line.latency,
            1e3 * statistics.median(peers),
            statistics.median(a / b for a, b in zip(measured, peers, strict=True)),
        )
        if options.compare:
            report = compared(shape, model, inputs, count, per_rank, times)
            if not dist.get_rank():
                print(report)


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


def of_a_line(workers: int, count: int, per_rank: int) -> Schedule:
    if per_rank == 1:
        return schedules.one_f_one_b(workers, count)
    return schedules.interleaved(workers, count, stages=per_rank * workers)


def ours(
    shape: str, model: Tree, inputs: Inputs, count: int, per_rank: int
) -> tuple[Contestant, fxsched.Backend]:
    model = copy.deepcopy(model)
    workers = dist.get_world_size()
    schedule = of_a_line(workers, count, per_rank)
    if shape != "chain":
        schedule = schedules.graph(workers, count)
    size = 2 // per_rank  # blocks of a stage
    names = [f"blocks.{i}" for i in range(size, len(model.blocks), size)]
    backend = fxsched.backend(schedule, names)
    compiled: Any = torch.compile(model, backend=backend)
    name = f"{schedule.name}, {per_rank} a rank"
    return Contestant(name, model, lambda: compiled(*inputs).backward()), backend


def peer(model: Tree, inputs: Inputs, count: int, per_rank: int) -> Contestant:
    """The blocks in a row: a branch's are there, but nothing runs beside them."""
    kind: Any = Schedule1F1B if per_rank == 1 else ScheduleInterleaved1F1B
    model = copy.deepcopy(model)
    rank, workers = dist.get_rank(), dist.get_world_size()
    size, stages = 2 // per_rank, per_rank * workers
    here = [
        PipelineStage(
            Stretch(model, range(s * size, (s + 1) * size)),
            s,
            stages,
            torch.device("cpu"),
        )
        for s in range(rank, stages, workers)
    ]
    schedule = kind(
        here[0] if per_rank == 1 else here,
        count,
        loss_fn=lambda out, _: loss(out) / count,
        scale_grads=False,
    )
    named = {f"x{i}": x for i, x in enumerate(inputs)}
    target = inputs[0] if rank == workers - 1 else None  # it takes none for no loss

    def step() -> None:
        schedule.step(**named, target=target, return_outputs=False)

    return Contestant(kind.__name__.removeprefix("Schedule"), model, step)


def compared(
    shape: str, model: Tree, inputs: Inputs, count: int, per_rank: int, times: Times
) -> str:
    """Where a recorded step and the simulated one part."""
    contestant, backend = ours(shape, model, inputs, count, per_rank)
    backend.record = True
    measure([contestant], 1)
    assert backend.plan is not None
    predicted = backend.plan.simulate(times, transfer=0.0).timeline
    return f"{shape}, {contestant.name}\n\n{compare(predicted, backend.timeline)}\n"


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
