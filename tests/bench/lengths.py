"""Batches of as many lengths: a plan for each, or for those that fill them up.

Each contestant runs in a process of its own: the first epoch makes plans, the second
has them.
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

import torch
from tabulate import tabulate

import fxsched
from fxsched import schedules
from fxsched.models.gpt import GPT, GPTConfig

LENGTHS = {"as it is": None, "lengths=": {"tokens": (1, 0), "targets": (1, -100)}}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", type=int, default=30, help="that batches have (30)")
    add("--least", type=int, default=33, help="tokens of a sequence (33)")
    add("--most", type=int, default=512, help="(512)")
    add("--blocks", type=int, default=4, help="of the model (4)")
    add("--width", type=int, default=128, help="(128)")
    add("--batch", type=int, default=8, help="(8)")
    add("--one", help=argparse.SUPPRESS)  # a contestant, in this process
    parser.set_defaults(run=run, workers=0)


def run(options: argparse.Namespace) -> int:
    if options.one:
        print(json.dumps(_measure(options.one, options)))
        return 0
    rows = [(name, *_fresh(name, options)) for name in LENGTHS]
    head = ("", "plans", "first epoch", "second")
    print(f"{options.lengths} lengths; seconds of an epoch\n")
    print(tabulate(rows, head, floatfmt=".1f"))
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


def _measure(name: str, options: argparse.Namespace) -> Sequence[float]:
    torch.manual_seed(0)
    spans = range(options.least, options.most + 1)
    lengths = random.Random(0).sample(spans, options.lengths)
    batches = [torch.randint(4096, (2, options.batch, length)) for length in lengths]
    config = GPTConfig(4096, options.most, options.width, layers=options.blocks)
    model, seconds, plans = GPT(config), [], dict[int, fxsched.Plan]()
    schedule = schedules.one_f_one_b(2, 4)
    with fxsched.backend(
        schedule, transport="threads", lengths=LENGTHS[name]
    ) as backend:
        step = torch.compile(model, backend=backend)
        for _ in range(2):
            start = time.perf_counter()
            for tokens, targets in batches:
                model.zero_grad()
                step(tokens, targets).backward()
                assert backend.plan is not None
                plans[id(backend.plan)] = backend.plan
            seconds.append(time.perf_counter() - start)
    return [len(plans), *seconds]
