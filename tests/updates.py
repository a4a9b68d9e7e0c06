"""What tests of updates share: optimizers, schedules, and the loop by eager PyTorch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxsched import Schedule, schedules
from tests.cases import MICROBATCHES, anything, build

CALLS = 5
# An optimizer divides gradients by their size, also those that are 0 but for rounding.
TOLERANCE: dict[str, Any] = {"rtol": 1e-7, "atol": 1e-8}
Made = Callable[[nn.Module], Optimizer]


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    """Two groups: vectors don't decay."""
    parameters = list(model.parameters())
    decayed = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 2e-3}]
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)


def adafactor(model: nn.Module) -> Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01, eps=(1e-12, 1e-3))


OPTIMIZERS: dict[str, Made] = {
    each.__name__: each for each in (momentum, adamw, adafactor)
}


def build_double(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model and a batch in float64: some gradients of attention are 0 but for
    rounding, and Adam divides by how large they are."""
    model, inputs = build(name)
    doubles = (x.double() if x.is_floating_point() else x for x in inputs)
    return model.double(), tuple(doubles)


def spread(schedule: Schedule, seed: int = 0) -> Schedule:
    """With u that puts each stage on some worker."""
    draw = random.Random(seed)
    workers = [draw.randrange(schedule.workers) for _ in range(64)]
    return replace(schedule, u=lambda s, b: workers[s])


def placed(seed: int, workers: int = 4) -> Schedule:
    """A random w with a random u, two updates in a call."""
    return replace(spread(anything(seed, workers), seed), update_every=2)


def copied(zero: int, workers: int = 4) -> Schedule:
    """Two pipelines whose stages share the optimizer."""
    inside = schedules.one_f_one_b(workers // 2, MICROBATCHES // 2)
    return schedules.replicate(inside, 2, zero)


def synchronous(workers: int) -> dict[str, Callable[[], Schedule]]:
    """Schedules whose jobs all read the weights of the updates before."""
    count, line = MICROBATCHES, schedules.one_f_one_b(workers, MICROBATCHES)
    return {
        "ddp": lambda: schedules.ddp(workers),
        "fsdp": lambda: schedules.fsdp(workers),
        "zero1": lambda: schedules.zero1(workers),
        "zero2": lambda: schedules.zero2(workers),
        "copies of zero1": lambda: copied(1, workers),
        "copies of zero2": lambda: copied(2, workers),
        "one_f_one_b": lambda: line,
        "interleaved": lambda: schedules.interleaved(workers, count),
        "zb_h1": lambda: schedules.zb_h1(workers, count),
        "graph": lambda: schedules.graph(workers, count),
        "spread": lambda: spread(schedules.ddp(workers)),
        "twice": lambda: replace(line, update_every=2),
        "placed": lambda: placed(3, workers),
    }


SCHEDULES = synchronous(4)


def batches(inputs: tuple[Tensor, ...], calls: int = CALLS) -> Iterator[Any]:
    """A batch for each call: the rows in other orders."""
    for call in range(calls):
        yield tuple(value.roll(call, 0) for value in inputs)


def eager(
    model: nn.Module,
    made: Made,
    inputs: tuple[Tensor, ...],
    every: int,
    microbatches: int = MICROBATCHES,
    clip: float | None = None,
) -> tuple[list[float], nn.Module]:
    """Losses and the model after CALLS calls of plain PyTorch on the microbatches."""
    model = copy.deepcopy(model)
    optimizer = made(model)
    losses = []
    for batch in batches(inputs):
        parts = list(zip(*(value.chunk(microbatches) for value in batch), strict=True))
        total = 0.0
        for number, part in enumerate(parts, 1):
            loss = model(*part)
            total += float(loss.detach())
            (loss / every).backward()
            if number % every == 0:
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(total / microbatches)
    return losses, model
