"""Batches of as many lengths: a plan for each, or a collator that pads to a few.

Each contestant runs in a process of its own, by turns: the first epoch makes plans, the
second has them. Eager PyTorch pads nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn.functional import pad

import fxsched
from fxsched import schedules
from fxsched.models.gpt import GPT, GPTConfig

CONTESTANTS = ("each length", "collator", "eager")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", type=int, default=30, help="that batches have (30)")
    add("--least", type=int, default=33, help="tokens of a sequence (33)")
    add("--most", type=int, default=512, help="(512)")
    add("--blocks", type=int, default=4, help="of the model (4)")
    add("--width", type=int, default=128, help="(128)")
    add("--batch", type=int, default=8, help="(8)")
    add("--rounds", type=int, default=3, help="of which medians are shown (3)")
    add("--one", help=argparse.SUPPRESS)  # a contestant, in this process
    parser.set_defaults(run=run, workers=0)


def run(options: argparse.Namespace) -> int:
    if options.one:
        print(json.dumps(_measure(options.one, options)))
        return 0
    found: dict[str, list[Sequence[float]]] = {name: [] for name in CONTESTANTS}
    for _ in range(options.rounds):
        for name, rounds in found.items():
            rounds.append(_fresh(name, options))
    rows = [
        (name, *map(median, zip(*rounds, strict=True)))
        for name, rounds in found.items()
    ]
    head = ("", "plans", "first epoch", "second")
    print(f"{options.lengths} lengths; seconds of an epoch\n")
    print(tabulate(rows, head, floatfmt=("", ".0f", ".1f", ".1f")))
    return 0


def _fresh(name: str, options: argparse.Namespace) -> Sequence[float]:
    """Plans and seconds of one contestant, which finds no plan on disk."""
    command = [sys.executable, "-m", "tests.bench", "lengths", "--one", name]
    for option in ("lengths", "least", "most", "blocks", "width", "batch"):
        command += [f"--{option}", str(getattr(options, option))]
    done = subprocess.run(
        command,
        env={**os.environ, "FXSCHED_CACHE": ""},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def draw(
    count: int, least: int, most: int, rows: int, vocabulary: int
) -> list[tuple[Tensor, Tensor]]:
    """Batches of tokens and targets, each of another length."""
    lengths = random.Random(0).sample(range(least, most + 1), count)
    return [
        (
            torch.randint(vocabulary, (rows, length)),
            torch.randint(vocabulary, (rows, length)),
        )
        for length in lengths
    ]


def collate(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The batch padded to one of four lengths in each doubling: 40, 48, 56, 64, 80 ..
    The loss ignores targets of -100."""
    length = tokens.shape[1]
    step = 2 ** max((length - 1).bit_length() - 3, 0)
    more = -length % step
    return pad(tokens, (0, more)), pad(targets, (0, more), value=-100)


def _measure(name: str, options: argparse.Namespace) -> Sequence[float]:
    torch.manual_seed(0)
    batches = draw(options.lengths, options.least, options.most, options.batch, 4096)
    config = GPTConfig(4096, options.most, options.width, layers=options.blocks)
    model, seconds, plans = GPT(config), [], dict[int, fxsched.Plan]()
    schedule = schedules.one_f_one_b(2, 4)
    with fxsched.backend(schedule, transport="threads") as backend:
        step = torch.compile(model, backend=backend, dynamic=True)
        for _ in range(2):
            start = time.perf_counter()
            for batch in batches:
                model.zero_grad()
                inputs = collate(*batch) if name == "collator" else batch
                (model if name == "eager" else step)(*inputs).backward()
                if backend.plan is not None:
                    plans[id(backend.plan)] = backend.plan
            seconds.append(time.perf_counter() - start)
    return [len(plans), *seconds]
