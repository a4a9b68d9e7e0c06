"""What a checkpoint adds to a step, written in the background or while all wait."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

import fxsched
from fxsched import schedules

from .hosts_race import BLOCKS, LENGTH, ROWS, WIDTH, Chain
from .measure import slowest
from .naps import calibrate

STEPS = 4  # of a turn; the checkpoint is saved before the first of them


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, default=2, help="ranks (2)")
    add("--rounds", type=int, default=5, help="turns of each contestant (5)")
    add("--forward", type=float, default=30.0, metavar="MS", help="of a block (30)")
    add("--microbatches", type=int, default=8, help="(8)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The contestants take turns of STEPS steps."""
    calibrate()
    workers, count = options.workers, options.microbatches
    model = Chain(options.forward / 1e3)
    names = [f"blocks.{BLOCKS * s // workers}" for s in range(1, workers)]
    backend = fxsched.backend(schedules.one_f_one_b(workers, count), names)
    step: Any = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(count * ROWS, LENGTH, WIDTH)

    def steps() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            step(x).backward()
            optimizer.step()

    steps()
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)

        def save(background: bool) -> None:
            given: Any = {"keep": 1, "background": background}
            fxsched.save(shared[0], model, optimizer, backend, **given)

        saves: dict[str, Callable[[], None]] = {
            "no checkpoint": lambda: None,
            "background=True": lambda: save(True),
            "background=False": lambda: save(False),
        }
        taken = _taken(saves, steps, options.rounds)
        dist.barrier()
    backend.close()
    if dist.get_rank() == 0:
        plain = taken["no checkpoint"] / STEPS
        size = 3 * sum(p.nbytes for p in model.parameters()) / 1e6
        print(
            f"{workers} ranks save {size:.0f} MB of weights and moments; a step takes "
            f"{plain:.3f} s\n"
        )
        rows = [
            (name, f"{seconds:.3f}", f"{seconds / plain - STEPS:+.1%}")
            for name, seconds in taken.items()
        ]
        heads = ["", f"s of {STEPS} steps", "adds, of a step"]
        print(tabulate(rows, heads, "github", disable_numparse=True))
    return 0


def _taken(
    saves: dict[str, Callable[[], None]], steps: Callable[[], None], rounds: int
) -> dict[str, float]:
    """The median seconds of a turn, each as long as on its slowest rank."""
    taken: dict[str, list[float]] = {name: [] for name in saves}
    for number in range(-1, rounds):
        for name, save in saves.items():
            dist.barrier()
            begins = time.perf_counter()
            save()
            steps()
            turn = float(slowest([time.perf_counter() - begins])[0])
            if number >= 0:
                taken[name].append(turn)
    return {name: statistics.median(turns) for name, turns in taken.items()}
