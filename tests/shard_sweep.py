"""Models in shards beside eager PyTorch: python -m tests.shard_sweep [MODEL ..].

Each model of tests/shard_models.py in 2 and in 4 shards, found and by name, under each
schedule there: losses, gradients and parameters after three steps of AdamW equal
eager's, or, with dropout, those of gpipe without shards. On threads; with --ranks 2 or
4 on as many ranks of torchrun. With --optimizer the program steps AdamW, clips and
updates by the schedule's u: losses, parameters and the optimizer's state equal eager's.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxsched
from fxsched import Plan
from fxsched.params.record import pieces_of, record_of
from fxsched.placement import choice
from fxsched.placement.choice import gain

from .cases import Result, assert_equal, eager_step, microbatch, optimizer, train
from .shard_models import CASES, SCHEDULES, UPDATING, Words, made, share
from .torchrun import again_on_ranks

INDIVISIBLE = ("grouped_llama", "three_encoder", "llama with dropout")  # by 4
CLIP = 0.3  # to which norm programs clip
WAYS = ("auto", "name", "vocabulary", "all", "slices")
NEAR = 3e-6  # AdamW makes more of what small gradients are apart


class Cell(NamedTuple):
    """A model under a schedule.

    by: "auto", "name", "vocabulary" with its names too, "all" where auto cuts every
        vocabulary, or "slices" where all that may be is in slices between sums.
    """

    model: str
    schedule: str
    shards: int
    by: str

    @property
    def options(self) -> dict[str, Any]:
        case = CASES[self.model]
        words: dict[str, Words] = {
            "name": case.words,
            "vocabulary": {**case.words, **(case.vocabulary or {})},
            "slices": {"*": "sequence"},
        }
        return {"shards": words[self.by]} if self.by in words else {}

    def __str__(self) -> str:
        return f"{self.model} {self.schedule} {self.shards} by {self.by}"


def cells(
    models: Sequence[str], ranks: int | None, updates: bool = False
) -> Iterator[Cell]:
    for model in models or CASES:
        for shards in (2, 4):
            for schedule in UPDATING if updates else SCHEDULES:
                if ranks not in (None, UPDATING[schedule](shards).workers):
                    continue
                if CASES[model].whole and UPDATING[schedule](shards).update_every:
                    continue  # an update of a part of the rows that meet
                if CASES[model].drops and updates:
                    continue  # no eager model draws the same numbers
                yield Cell(model, schedule, shards, "auto")
                if not updates:
                    yield Cell(model, schedule, shards, "all")
                    if shards == 2 or model != "unet":  # no rows or channels divide
                        yield Cell(model, schedule, shards, "slices")
                divides = shards == 2 or model not in INDIVISIBLE
                if CASES[model].words and divides:
                    yield Cell(model, schedule, shards, "name")
                if CASES[model].vocabulary and divides:
                    yield Cell(model, schedule, shards, "vocabulary")


def check(cell: Cell) -> Plan:
    """Three steps, planned and in eager PyTorch, or, with dropout, planned without
    shards. Raises AssertionError if they differ.

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

    case = CASES[cell.model]
    count = 1 if case.whole else schedule.microbatches
    torch.manual_seed(1)
    if case.drops:
        wanted = unsharded(eager, inputs, count)
    else:
        wanted = train(eager, lambda: eager_step(eager, inputs, count), "adamw")
    torch.manual_seed(1)
    found = train_on_ranks(model, step) if dist.is_initialized() else None
    assert_equal(found or train(model, step, "adamw"), wanted, near=NEAR)
    assert backend.plan is not None
    return backend.plan


def unsharded(model: nn.Module, inputs: Sequence[Tensor], count: int) -> Result:
    """Three steps in one piece, whose random numbers are those of any schedule."""
    alone = fxsched.schedules.gpipe(1, count)
    run = torch.compile(model, backend=fxsched.backend(alone, transport="threads"))

    def step() -> Tensor:
        loss: Tensor = run(*inputs)
        loss.backward()
        return loss

    return train(model, step, "adamw")


def check_updates(cell: Cell) -> Plan:
    """Three steps of the program's, and of eager PyTorch. Raises AssertionError if they
    differ."""
    model, inputs = made(cell.model)
    schedule = UPDATING[cell.schedule](cell.shards)
    eager = copy.deepcopy(model)
    mine, others = optimizer("adamw", model), optimizer("adamw", eager)
    backend = fxsched.backend(
        schedule, optimizer=mine, clip_grad_norm=CLIP, **cell.options
    )
    run = torch.compile(model, backend=backend)
    found, wanted = Result(), Result()
    every = schedule.update_every or schedule.microbatches
    parts = 1 if CASES[cell.model].whole else every
    for _ in range(3):
        found.losses.append(run(*inputs).detach())
        losses = []
        for update in range(schedule.microbatches // every):
            rows = microbatch(inputs, update, schedule.microbatches // every)
            losses.append(eager_step(eager, rows, parts))
            torch.nn.utils.clip_grad_norm_(eager.parameters(), CLIP)
            others.step()
            others.zero_grad()
        wanted.losses.append(torch.stack(losses).mean())
    state = fxsched.full_state_dict(model)
    found.parameters = {name: state[name] for name, _ in model.named_parameters()}
    wanted.parameters = {name: p.data for name, p in eager.named_parameters()}
    assert_equal(found, wanted, near=NEAR)
    kept = fxsched.full_optimizer_state_dict(model, mine)["state"]
    assert_same_state(kept, others.state_dict()["state"])
    assert backend.plan is not None
    return backend.plan


def assert_same_state(found: dict[int, Any], wanted: dict[int, Any]) -> None:
    """AdamW's, whose numbers are as large as gradients, which may be 0 but for
    rounding."""
    assert list(found) == list(wanted)
    for number, state in wanted.items():
        for key, value in state.items():
            its = found[number][key]
            if key == "exp_avg_sq":
                its, value = its.sqrt(), value.sqrt()
            near = 1e-4 * float(value.abs().max()) + 1e-8
            torch.testing.assert_close(its, value, rtol=1e-3, atol=near)


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
        name: (pieces_of(p, p.grad), own.cut if own else None)
        for name, p in model.named_parameters()
        for own in [record_of(p).parts]
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


def report(cell: Cell, checked: Callable[[Cell], Plan] = check) -> bool:
    """Prints a row; whether it is equal."""
    start = time.perf_counter()
    torch._dynamo.reset()
    try:
        plan = checked(cell)
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
    parser.add_argument("--by", choices=WAYS)
    parser.add_argument("--schedule", choices=SCHEDULES)
    parser.add_argument("--ranks", type=int, choices=(2, 4))
    parser.add_argument("--optimizer", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.ranks and "RANK" not in os.environ:
        sys.exit(again_on_ranks(given.ranks, "tests.shard_sweep"))
    if given.ranks:
        dist.init_process_group("gloo")
    every = [
        cell
        for cell in cells(given.models, given.ranks, given.optimizer)
        if given.by in (None, cell.by) and given.schedule in (None, cell.schedule)
    ]
    checked = check_updates if given.optimizer else check
    equal = sum([report(cell, checked) for cell in every])
    if not given.ranks or dist.get_rank() == 0:
        print(f"{equal} of {len(every)} equal to eager")
    if given.ranks:
        dist.destroy_process_group()
    sys.exit(equal < len(every))


if __name__ == "__main__":
    main()
