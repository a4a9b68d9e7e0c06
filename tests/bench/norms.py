"""CLIP with a ResNet-18, whose BatchNorms see the whole batch, beside eager PyTorch.

The rival trains the same model in one process with as many threads as there are ranks,
each of which has one. Contestants take their steps in turn; a step lasts as long as on
its slowest rank. Before it is timed, a contestant's gradients must be eager PyTorch's
on the whole batch. Each tower's own step, with one thread, is printed too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fxsched
from fxsched import schedules
from fxsched.models.two_tower import Tower, TwoTowerConfig

from .measure import Contestant, check, measure

SCHEDULES = {"1f1b": schedules.one_f_one_b, "graph": schedules.graph}
TOLERANCE = 1e-3  # of gradients in float32, through 20 norms
WORDS, PIXELS = 4096, 32


class Residual(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)),
        )
        self.short = nn.Sequential()
        if stride > 1:
            self.short.append(nn.Conv2d(before, width, 1, stride, bias=False))
            self.short.append(nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


def resnet18(out: int) -> nn.Sequential:
    """He et al. 2015 (arXiv 1512.03385), with the first layer that 32 x 32 pixels get:
    [rows, 3, 32, 32] -> [rows, out]."""
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [
        Residual(before, width, 1 + (width > before))
        for before, width in pairwise(widths)
    ]
    first = (nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, out)
    return nn.Sequential(*first, *blocks, *last)


class Clip(nn.Module):
    """An image tower, a text tower and CLIP's loss."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        length, width = options.length, options.width
        config = TwoTowerConfig(WORDS, length, length, width, layers=options.layers)
        self.image = resnet18(width)
        self.text = Tower(config, nn.Embedding(WORDS, width), length)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, pixels: Tensor, tokens: Tensor) -> Tensor:
        images = F.normalize(self.image(pixels), dim=-1)
        texts = F.normalize(self.text(tokens), dim=-1)
        logits = self.scale.exp() * images @ texts.T
        own = torch.arange(len(logits))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    add = parser.add_argument
    add("--workers", type=int, default=2, help="ranks (2)")
    add("--microbatches", type=int, default=8, help="(8)")
    add("--batch", type=int, default=32, help="(32)")
    add("--layers", type=int, default=8, help="blocks of the text tower (8)")
    add("--width", type=int, default=256, help="of the text tower (256)")
    add("--length", type=int, default=64, help="tokens of a text (64)")
    names = list(SCHEDULES)
    add("--only", nargs="+", choices=names, default=names, metavar="NAME")
    add("--steps", type=int, default=10, help="of each contestant (10)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    workers = dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(options.batch, 3, PIXELS, PIXELS, generator=generator)
    shape = options.batch, options.length
    tokens = torch.randint(1, WORDS, shape, generator=generator)
    eager = Clip(options)
    eager(pixels, tokens).backward()
    gradients = ((name, p.grad) for name, p in eager.named_parameters())
    wanted = {name: grad for name, grad in gradients if grad is not None}

    def alone() -> None:
        if dist.get_rank():
            return
        torch.set_num_threads(workers)
        eager(pixels, tokens).backward()
        torch.set_num_threads(1)

    contestants = [Contestant(f"eager, {workers} threads", eager, alone)]
    for name in options.only:
        model = Clip(options)
        made = SCHEDULES[name](workers, options.microbatches)
        step = torch.compile(model, backend=fxsched.backend(made))
        contestants.append(Contestant(name, model, _stepped(step, pixels, tokens)))
    for contestant in contestants:
        check(contestant, wanted, TOLERANCE)
    taken = measure(contestants, options.steps)
    if not dist.get_rank():
        print(table(contestants, [taken[id(each)] for each in contestants]))
        for tower, inputs in (("image", pixels), ("text", tokens)):
            milliseconds = 1000 * _alone(getattr(eager, tower), inputs)
            print(f"{tower} alone: {milliseconds:.0f} ms")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _stepped(step: Callable[..., Any], *inputs: Tensor) -> Callable[[], None]:
    return lambda: step(*inputs).backward()


def _alone(tower: nn.Module, inputs: Tensor) -> float:
    """Seconds of F and B of a tower, with one thread."""
    taken = []
    for _ in range(4):
        start = time.perf_counter()
        loss: Tensor = tower(inputs).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def table(contestants: list[Contestant], seconds: list[list[float]]) -> str:
    rows = []
    for each, taken in zip(contestants, seconds, strict=True):
        pairs = zip(taken, seconds[0], strict=True)
        ratio = statistics.median(mine / other for mine, other in pairs)
        median = 1000 * statistics.median(taken)
        rows.append((each.name, f"{median:.0f}", f"{ratio:.3f}", f"{each.error:.0e}"))
    return tabulate(
        rows,
        ["contestant", "ms", "/ eager", "error"],
        colalign=("left", "right", "right", "right"),
        disable_numparse=True,
    )
