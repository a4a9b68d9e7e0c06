"""Models in shards beside eager PyTorch: python -m tests.shard_sweep [MODEL ..].

Each model of tests/shard_models.py in 2 and in 4 shards, found and by name, under each
schedule there: losses, gradients and parameters after three steps of AdamW equal
eager's. On threads; with --ranks 2 or 4 on as many ranks of torchrun.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxsched
from fxsched import Plan
from fxsched.sharding import choice
from fxsched.sharding.cost import gain
from fxsched.state.cuts import CUTS, pieces_of

from .cases import Result, assert_equal, eager_step, train
from .shard_models import CASES, SCHEDULES, made, share
from .torchrun import again_on_ranks

NEAR = 3e-6  # AdamW makes more of what small gradients are apart


class Cell(NamedTuple):
    """A model under a schedule.

    by: "auto", "name", "vocabulary" with its names too, or "all" where auto cuts every
        vocabulary.
    """

    model: str
    schedule: str
    shards: int
    by: str

    @property
    def options(self) -> dict[str, Any]:
        case = CASES[self.model]
        words = {"name": case.words, "vocabulary": case.words | (case.vocabulary or {})}
        return {"shards": words[self.by]} if self.by in words else {}

    def __str__(self) -> str:
        return f"{self.model} {self.schedule} {self.shards} by {self.by}"


def cells(models: Sequence[str], ranks: int | None) -> Iterator[Cell]:
    for model in models or CASES:
        for shards in (2, 4):
            for schedule in SCHEDULES:
                if ranks not in (None, SCHEDULES[schedule](shards).workers):
                    continue
                yield Cell(model, schedule, shards, "auto")
                yield Cell(model, schedule, shards, "all")
                divides = shards == 2 or model not in ("grouped_llama", "three_encoder")
                if CASES[model].words and divides:
                    yield Cell(model, schedule, shards, "name")
                if CASES[model].vocabulary and divides:
                    yield Cell(model, schedule, shards, "vocabulary")


def check(cell: Cell) -> Plan:
    """Three steps, planned and in eager PyTorch. Raises AssertionError if they differ.

    On ranks, gradients and parameters are joined from what the ranks have."""
    model, inputs = made(cell.model)
    schedule = SCHEDULES[cell.schedule](cell.shards)
    eager = copy.deepcopy(model)
    backend = fxsched.backend(schedule, **cell.options)
    run = torch.compile(model, backend=backend)
    choice.gain = (lambda *_: 1.0) if cell.by == "all" else gain

    def step() -> Tensor:
        loss: Tensor = run(*inputs)
        loss.backward()
        return loss

    count = 1 if CASES[cell.model].whole else schedule.microbatches
    wanted = train(eager, lambda: eager_step(eager, inputs, count), "adamw")
    found = train_on_ranks(model, step) if dist.is_initialized() else None
    assert_equal(found or train(model, step, "adamw"), wanted, near=NEAR)
    assert backend.plan is not None
    return backend.plan


def train_on_ranks(model: nn.Module, step: Any) -> Result:
    """What all ranks have after three steps, joined."""
    kept: dict[str, Tensor | None] = {}

    def first() -> Tensor:
        loss: Tensor = step()
        if not kept:
            kept.update(joined_gradients(model))
        return loss

    result = train(model, first, "adamw")
    state = fxsched.full_state_dict(model)
    result.gradients = kept
    result.parameters = {name: state[name] for name, _ in model.named_parameters()}
    result.buffers = {
        name: state.get(name, buffer) for name, buffer in model.named_buffers()
    }
    return result


def joined_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Whole gradients, each joined from the parts that ranks have."""
    mine = {
        name: (pieces_of(p, p.grad), CUTS[p].cut if p in CUTS else None)
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    found: dict[str, Tensor | None] = {}
    for name, _ in model.named_parameters():
        parts, cut = {}, None
        for theirs in every:
            some, its = theirs.get(name, ({}, None))
            parts |= some
            cut = cut or its
        every_part = [parts[p] for p in sorted(parts)]
        found[name] = cut.joined(every_part) if cut else (every_part or [None])[0]
    return found


def report(cell: Cell) -> bool:
    """Prints a row; whether it is equal."""
    start = time.perf_counter()
    torch._dynamo.reset()
    try:
        plan = check(cell)
        layers = CASES[cell.model].layers
        text = f"equal, {100 * share(plan, made(cell.model)[0], layers):.1f} %"
        same = True
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line] or [""]
        text, same = f"{type(error).__name__}: {' '.join(lines)[:300]}", False
        if dist.is_initialized():
            print(f"{cell!s:40}{text}", flush=True)
            os._exit(1)  # other ranks wait for what doesn't come
    if not dist.is_initialized() or dist.get_rank() == 0:
        seconds = time.perf_counter() - start
        print(f"{cell!s:40}{text}  ({seconds:.0f} s)", flush=True)
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", choices=[*CASES, []], metavar="MODEL")
    parser.add_argument("--by", choices=("auto", "all", "name", "vocabulary"))
    parser.add_argument("--schedule", choices=SCHEDULES)
    parser.add_argument("--ranks", type=int, choices=(2, 4))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.ranks and "RANK" not in os.environ:
        sys.exit(again_on_ranks(given.ranks, "tests.shard_sweep"))
    if given.ranks:
        dist.init_process_group("gloo")
    every = [
        cell
        for cell in cells(given.models, given.ranks)
        if given.by in (None, cell.by) and given.schedule in (None, cell.schedule)
    ]
    equal = sum([report(cell) for cell in every])
    if not given.ranks or dist.get_rank() == 0:
        print(f"{equal} of {len(every)} equal to eager")
    if given.ranks:
        dist.destroy_process_group()
    sys.exit(equal < len(every))


if __name__ == "__main__":
    main()
