"""What fxsched adds to the stages' own work, for each job, in microseconds.

Four stages of Linear and GELU, small enough that Python is most of the step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, fx, nn

import fxsched
from fxsched import Schedule
from fxsched.schedules import oldest_microbatch_first

STAGES = 4


class Stages(nn.Module):
    """`stages` times a Linear and a GELU; the sum of what comes out."""

    def __init__(self, width: int, stages: int = STAGES) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(stages)
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.sum()


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    model = Stages(options.width)
    batch = torch.randn(options.microbatches * options.rows, options.width)
    contestants: dict[str, Callable[[], None]] = {}
    plans = []
    for order in ("static", "dynamic"):
        backend = fxsched.backend(
            alone(options.microbatches),
            stages=[f"stages.{s}" for s in range(1, STAGES)],
            transport="threads",
            order=order,
        )
        contestants[order] = compiled(model, backend, batch)
        plans.append(backend)
    contestants["static"]()
    plan = plans[0].plan
    assert plan is not None
    contestants["plain loop"] = loop(model, plan.programs[0], batch, options)
    taken = race(contestants, model, options.steps)
    jobs = 2 * STAGES * options.microbatches
    plain = taken["plain loop"]
    rows = [
        (name, 1e6 * seconds / jobs, 1e6 * (seconds - plain) / jobs)
        for name, seconds in taken.items()
    ]
    print(f"{jobs} jobs of {STAGES} stages, one worker; medians, microseconds a job\n")
    print(tabulate(rows, ("", "in all", "above the loop"), floatfmt=".1f"))
    return 0


def alone(microbatches: int) -> Schedule:
    """All stages on one worker, one microbatch after the other."""
    n = oldest_microbatch_first(STAGES)
    return Schedule(1, microbatches, STAGES, w=lambda s, b, d: (0, 0), n=n)


def compiled(
    model: nn.Module, backend: fxsched.Backend, batch: Tensor
) -> Callable[[], None]:
    step: Any = torch.compile(model, backend=backend)

    def run() -> None:
        step(batch).backward()

    return run


def race(
    contestants: dict[str, Callable[[], None]], model: nn.Module, rounds: int
) -> dict[str, float]:
    """The median step of each, in turns, after two rounds to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(-2, rounds):
        for name, step in contestants.items():
            model.zero_grad()
            start = time.perf_counter()
            step()
            if number >= 0:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def loop(
    model: Stages, program: fx.GraphModule, batch: Tensor, options: argparse.Namespace
) -> Callable[[], None]:
    """A loop over the same graphs of F and B, with nothing around them."""
    flats: Any = program
    forwards, backwards = [], []
    for s in range(STAGES):
        forwards.append(getattr(flats, f"forward_{s}").flat_forward.forward)
        flat = getattr(flats, f"backward_{s}").flat_backward
        names = [n.name for n in flat.graph.find_nodes(op="placeholder")]
        known = ["primals_1", "primals_2", "primals_3", "addmm", "tangents_1"]
        backwards.append((flat.forward, [known.index(name) for name in names]))
    scale = torch.full((), 1 / options.microbatches)

    @torch.no_grad()
    def run() -> None:
        weights = [(m[0].weight.detach(), m[0].bias.detach()) for m in model.stages]
        sums: list[Any] = [None] * STAGES
        for rows in batch.split(options.rows):
            value, saved = rows, []
            for forward, (weight, bias) in zip(forwards, weights, strict=True):
                out, kept = forward(weight, bias, value)
                saved.append((weight, bias, value, kept))
                value = out
            gradient = scale
            for s in reversed(range(STAGES)):
                backward, wanted = backwards[s]
                given = (*saved[s], gradient)
                found = backward(*[given[i] for i in wanted])
                own = found[-2:]
                gradient = found[0]
                if sums[s] is None:
                    sums[s] = list(own)
                else:
                    torch._foreach_add_(sums[s], list(own))
        for module, (weight, bias) in zip(model.stages, sums, strict=True):
            module[0].weight.grad, module[0].bias.grad = weight, bias

    return run
