"""Every synchronous way to train: python -m tests.train_all [--ranks 2 | 4].

Four models under each schedule of tests/updates.py and each optimizer, stepped by the
program and, where the schedule leaves that to it, by the loop: losses and parameters
after some calls equal those of eager PyTorch. On threads, or on ranks of torchrun.
With --bits: gradients under deterministic=True have the bits of the same microbatches
one after the other in one process, and with dropout those of a plan of one worker.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

import fxsched
from fxsched import Schedule

from . import bits
from .cases import MICROBATCHES
from .torchrun import again_on_ranks
from .updates import (
    OPTIMIZERS,
    TOLERANCE,
    Made,
    batches,
    build_double,
    eager,
    synchronous,
)

MODELS = ("mlp", "gpt", "two_tower", "unet")
LOOP = "loop"  # who steps
PROGRAM = "program"
Inputs = tuple[Tensor, ...]


def train(
    model: nn.Module, schedule: Schedule, inputs: Inputs, made: Made, who: str
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the calls, and, on rank 0, the model's state after them."""
    optimizer = made(model)
    backend = fxsched.backend(
        schedule,
        transport="distributed" if dist.is_initialized() else "threads",
        optimizer=optimizer if who == PROGRAM else None,
    )
    step = torch.compile(model, backend=backend)
    losses = []
    for batch in batches(inputs):
        loss = step(*batch)
        if who == LOOP:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    state = fxsched.full_state_dict(model)
    backend.close()
    return losses, dict(state)


def compare(
    model: nn.Module, schedule: Schedule, inputs: Inputs, made: Made, who: str
) -> None:
    """Raises AssertionError unless losses and parameters are the plain loop's."""
    every = schedule.update_every or MICROBATCHES
    wanted, reference = eager(model, made, inputs, every)
    losses, state = train(copy.deepcopy(model), schedule, inputs, made, who)
    assert_close(losses, wanted, **TOLERANCE)
    if not dist.is_initialized() or dist.get_rank() == 0:
        assert_close(state, dict(reference.state_dict()), **TOLERANCE)


def run(models: Sequence[str], ranks: int) -> int:
    cases = 0
    for name in models:
        for schedule, build in synchronous(ranks or 4).items():
            model, inputs = build_double(name)
            for optimizer, made in OPTIMIZERS.items():
                for who in (PROGRAM, LOOP):
                    if who == LOOP and build().update_every:
                        continue
                    torch._dynamo.reset()
                    print(f"{name}, {schedule}, {optimizer}, {who}", flush=True)
                    compare(model, build(), inputs, made, who)
                    cases += 1
    return cases


def train_bits(
    models: Sequence[str], ranks: int, seeds: int, names: Sequence[str]
) -> tuple[int, int]:
    """Compares bits of all models under all schedules; how many cases had them, and how
    many were refused."""
    cases = refused = 0
    transports = ("distributed", "gloo") if ranks else ("threads",)
    for name in models:
        for seed, (schedule, build) in enumerate(bits.schedules(ranks, seeds).items()):
            for order, way in product(("static", "dynamic"), transports):
                if names and schedule not in names:
                    continue
                carry = ("saved", "recompute")[seed % 2]
                print(f"{name}, {schedule}, {order}, {carry}, {way}", flush=True)
                options: Any = {"order": order, "carry": carry, "transport": way}
                equal = bits.compare(name, build(), **options)
                cases, refused = cases + equal, refused + (not equal)
    return cases, refused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=0, help="processes; 0 is threads")
    parser.add_argument("--models", nargs="+", choices=bits.MODELS, default=MODELS)
    parser.add_argument("--bits", type=int, metavar="SEEDS", help="compare bits")
    parser.add_argument("--schedules", nargs="+", default=(), help="with --bits: these")
    options = parser.parse_args()
    if options.ranks and "RANK" not in os.environ:
        return again_on_ranks(options.ranks, "tests.train_all")
    torch.set_num_threads(1)
    if options.ranks:
        dist.init_process_group("gloo")
    if options.bits is not None:
        cases, refused = train_bits(
            options.models, options.ranks, options.bits, options.schedules
        )
        print(f"{cases} cases have the bits of one process, {refused} were refused")
    else:
        cases = run(options.models, options.ranks)
        print(f"{cases} cases equal the plain loop")
    if options.ranks:
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
