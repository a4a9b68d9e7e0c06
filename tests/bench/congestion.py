"""Bytes that sums of gradients and parameter servers send, at the worker that sends or
receives the most."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxsched
from fxsched import schedules
from fxsched.accounts.traffic import traffic

BLOCKS, WIDTH = 8, 512


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--trainers",
        type=int,
        nargs="+",
        default=[2, 4, 8, 16],
        help="or workers of DDP",
    )
    add("--servers", type=int, nargs="+", default=[1, 2, 4, 8], help="keep the weights")
    parser.set_defaults(run=run, workers=0)


class Model(nn.Module):
    """Blocks of equal size, each of which is a stage."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks))
        )

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.blocks(x).square().mean()
        return loss


def run(options: argparse.Namespace) -> int:
    """Prints both tables, in multiples of the model's gradients, M."""
    rows = []
    for workers in options.trainers:
        ddp = schedules.ddp(workers)
        ring = 2 * (workers - 1) / workers
        cells = [
            _most(ddp, 1, sums="messages"),
            _most(ddp, BLOCKS, sums="messages"),
            _most(ddp, 1, sums="pieces"),
        ]
        rows.append([workers, *cells, f"{ring:.2f}"])
    heads = ["ddp", "one stage, messages", "8 stages, messages", "pieces", "2(W-1)/W"]
    print("M that the busiest worker sends or receives, whichever is more:\n")
    print(tabulate(rows, heads, "github"))
    rows = []
    for trainers in options.trainers:
        cells = [
            _most(schedules.parameter_server(trainers + n, servers=n), BLOCKS)
            for n in options.servers
        ]
        rows.append([trainers, *cells])
    heads = ["trainers", *(f"{n} servers" for n in options.servers)]
    print("\nParameter servers; F and B fetch weights that the worker has no more:\n")
    print(tabulate(rows, heads, "github"))
    return 0


def _most(schedule: fxsched.Schedule, blocks: int, **options: Any) -> str:
    model, stages = Model(blocks), [f"blocks.{i}" for i in range(1, blocks)] or "auto"
    x = torch.randn(schedule.microbatches, WIDTH)
    plan = fxsched.plan(model, schedule, x, stages=stages, **options)
    counted = traffic(plan.step)
    most = max(max(each.sent, each.received) for each in counted)
    return f"{most / (4 * sum(p.numel() for p in model.parameters())):.2f}"
