"""What fxsched and torch.distributed.pipelining add to small stages between two ranks.

The same stages, microbatches and placement; time above what the busiest rank's stages
take alone, for each job.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

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
from fxsched import schedules

from .measure import WARM, clear, slowest
from .overhead import STAGES, Stages, alone, loop

Step = Callable[[], None]


def run(options: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    count, world = options.microbatches, dist.get_world_size()
    batch = torch.randn(count * options.rows, options.width)
    contestants: dict[str, tuple[Stages, Step, int]] = {}
    for per_rank in (1, 2):
        model = Stages(options.width, per_rank * world)
        kind = Schedule1F1B if per_rank == 1 else ScheduleInterleaved1F1B
        name = "1F1B" if per_rank == 1 else "two stages a rank"
        mine, theirs = copy.deepcopy(model), copy.deepcopy(model)
        contestants[f"{name}, fxsched"] = (
            mine,
            ours(mine, batch, count, world, per_rank),
            per_rank,
        )
        contestants[f"{name}, torch"] = (
            theirs,
            peer(kind, theirs, batch, count, world),
            per_rank,
        )
    pure = compute(options, batch)
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(-WARM, options.steps):
        for name, (module, step, _) in contestants.items():
            clear(module)
            dist.barrier()
            start = time.perf_counter()
            step()
            if number >= 0:
                taken[name].append(time.perf_counter() - start)
    check(contestants)
    above: dict[str, float] = {}
    rows = []
    for name, (_, _, per_rank) in contestants.items():
        jobs = 2 * count * per_rank  # of a rank
        seconds = statistics.median(slowest(taken[name]).tolist())
        above[name] = 1e6 * (seconds / jobs - pure)
        rows.append((name, 1e6 * seconds / jobs, above[name], None))
        if name.endswith("torch"):
            rows[-2] = (*rows[-2][:3], rows[-2][2] / above[name])
    if not dist.get_rank():
        print(
            "medians, microseconds for each of a rank's jobs; the stages alone "
            f"take {1e6 * pure:.1f}\n"
        )
        headers = ("", "in all", "above the stages", "to the peer's")
        print(tabulate(rows, headers, floatfmt=(".1f", ".1f", ".1f", ".2f")))
    dist.destroy_process_group()
    return 0


def ours(model: Stages, batch: Tensor, count: int, world: int, per_rank: int) -> Step:
    stages = world * per_rank
    schedule = (
        schedules.one_f_one_b(world, count)
        if per_rank == 1
        else schedules.interleaved(world, count, stages=stages)
    )
    names = [f"stages.{s}" for s in range(1, stages)]
    step: Any = torch.compile(model, backend=fxsched.backend(schedule, stages=names))
    return lambda: step(batch).backward()


def peer(kind: Any, model: Stages, batch: Tensor, count: int, world: int) -> Step:
    stages = len(model.stages)
    here = [
        PipelineStage(model.stages[s], s, stages, torch.device("cpu"))
        for s in range(dist.get_rank(), stages, world)
    ]
    schedule = kind(
        here if kind is ScheduleInterleaved1F1B else here[0],
        count,
        loss_fn=lambda out, target: out.sum(),
        scale_grads=False,
    )
    target = torch.zeros(len(batch))

    def step() -> None:
        first = (batch,) if dist.get_rank() == 0 else ()
        last = dist.get_rank() == world - 1
        schedule.step(*first, target=target if last else None, return_outputs=False)

    return step


def compute(options: argparse.Namespace, batch: Tensor) -> float:
    """Seconds that F or B of a stage takes in a plain loop, while all ranks run one."""
    model = Stages(options.width)
    names = [f"stages.{s}" for s in range(1, STAGES)]
    schedule = alone(options.microbatches)
    plan = fxsched.plan(model, schedule, batch, stages=names)
    step = loop(model, plan.programs[0], batch, options)
    seconds = []
    for number in range(-WARM, options.steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        if number >= 0:
            seconds.append(time.perf_counter() - start)
    median = statistics.median(slowest(seconds).tolist())
    return median / (2 * STAGES * options.microbatches)


def check(contestants: dict[str, tuple[Stages, Step, int]]) -> None:
    """Gradients of ours and the peer's are equal where a rank has both."""
    names = list(contestants)
    for mine, theirs in zip(names[::2], names[1::2], strict=True):
        pairs = zip(
            contestants[mine][0].named_parameters(),
            contestants[theirs][0].parameters(),
            strict=True,
        )
        compared = 0
        for (name, a), b in pairs:
            if a.grad is not None and b.grad is not None:
                torch.testing.assert_close(
                    a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=name
                )
                compared += 1
        assert compared, f"{mine}: no gradient to compare"
