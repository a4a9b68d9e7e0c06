"""What each rank of tests/params/test_updates_state.py does: python -m
tests.ranks_updates_state."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import fxsched
from fxsched import Schedule, schedules
from fxsched.models.mlp import MLP, MLPConfig
from fxsched.params.released import is_given_up
from tests.ranks_state import everyone, refused
from tests.updates import TOLERANCE, adamw, build_double

B = 2  # microbatches
Batch = tuple[Tensor, ...]
Call = Callable[[int], None]


def spread() -> Schedule:
    """Data parallelism in which each rank updates half of the stages."""
    return replace(schedules.ddp(2), stages=4, u=lambda s, b: s % 2)


def small() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    x, y = torch.randn(4, 32), torch.randn(4, 16)
    return MLP(MLPConfig(width=32, layers=4)).double(), (x.double(), y.double())


def build(seed: int = 0) -> tuple[nn.Module, Batch]:
    model, inputs = small()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters() if seed else ():
            parameter.normal_(0.0, 0.02)
    return model, inputs


def batch(inputs: Batch, number: int) -> Batch:
    return tuple(value.roll(number, 0) for value in inputs)


def in_eager(model: nn.Module, optimizer: Optimizer, inputs: Batch) -> Call:
    """A call of plain PyTorch, that clips."""

    def call(number: int) -> None:
        optimizer.zero_grad()
        parts = zip(*(x.chunk(B) for x in batch(inputs, number)), strict=True)
        for part in parts:
            (model(*part) / B).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    return call


def in_program(
    model: nn.Module, optimizer: Optimizer, inputs: Batch, schedule: Schedule
) -> Call:
    """A call that steps the optimizer itself."""
    backend = fxsched.backend(schedule, optimizer=optimizer, clip_grad_norm=0.5)
    step = torch.compile(model, backend=backend)

    def call(number: int) -> None:
        step(*batch(inputs, number))

    return call


def in_loop(
    model: nn.Module, optimizer: Optimizer, inputs: Batch, schedule: Schedule
) -> Call:
    """A call, and the loop's own step."""
    step = torch.compile(model, backend=fxsched.backend(schedule))

    def call(number: int) -> None:
        optimizer.zero_grad()
        step(*batch(inputs, number)).backward()
        fxsched.clip_grad_norm_(model, 0.5)
        optimizer.step()

    return call


WAYS = {"program": in_program, "loop": in_loop}


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, **TOLERANCE)


def same_state(model: nn.Module, optimizer: Optimizer, reference: Any) -> None:
    its_model, its_optimizer = reference
    close(dict(fxsched.full_state_dict(model)), dict(its_model.state_dict()))
    state = fxsched.full_optimizer_state_dict(model, optimizer)
    wanted = its_optimizer.state_dict()
    assert list(state["state"]) == list(wanted["state"])
    close(state, wanted)


def saved(model: nn.Module, optimizer: Optimizer) -> tuple[Any, Any]:
    """What a file gives back."""
    file = io.BytesIO()
    whole = fxsched.full_optimizer_state_dict(model, optimizer)
    torch.save([fxsched.full_state_dict(model), whole], file)
    file.seek(0)
    state, moments = torch.load(file, weights_only=True)
    return state, moments


def guards(way: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Old values can't be saved, nor half of the optimizer's state."""
    behind = [p for p in model.parameters() if is_given_up(p)]
    refused(optimizer.state_dict, "fxsched.full_optimizer_state_dict(model, optimizer)")
    assert len(optimizer.state) < len(list(model.parameters()))
    if way == "program":
        assert not behind
        assert len(set(everyone(str(dict(model.state_dict()))))) == 1
        return
    assert behind and len(behind) < len(list(model.parameters()))
    other = 1 - dist.get_rank()
    refused(model.state_dict, f"the newest are on rank {other}; save fxsched.full_st")
    refused(lambda: copy.deepcopy(model), "this rank has old values of ")
    state = fxsched.full_state_dict(model)
    refused(lambda: model.load_state_dict(state), "fxsched.load_full_state_dict")
    parameters = list(model.parameters())
    refused(lambda: clip_grad_norm_(parameters, 0.3), "fxsched.clip_grad_norm_")


def resume(way: str) -> None:
    """Ranks equal eager, and both go on from what ranks saved, by any schedule."""
    model, inputs = build()
    reference = copy.deepcopy(model)
    its_optimizer, optimizer = adamw(reference), adamw(model)
    its_call = in_eager(reference, its_optimizer, inputs)
    call = WAYS[way](model, optimizer, inputs, spread())
    for number in range(3):
        its_call(number)
        call(number)
    guards(way, model, optimizer)
    same_state(model, optimizer, (reference, its_optimizer))
    guards(way, model, optimizer)  # as before
    state, moments = saved(model, optimizer)
    for number in range(3, 5):
        its_call(number)
        call(number)
    same_state(model, optimizer, (reference, its_optimizer))

    plain, _ = build(1)
    its_own = adamw(plain)
    plain.load_state_dict(state)
    its_own.load_state_dict(copy.deepcopy(moments))
    for number in range(3, 5):
        in_eager(plain, its_own, inputs)(number)
    same_state(plain, its_own, (reference, its_optimizer))

    for schedule, steps in ((schedules.gpipe(2, B), 0), (spread(), 1)):
        for other in WAYS.values():
            again, _ = build(2)
            its_own = adamw(again)
            call = other(again, its_own, inputs, schedule)
            for number in range(steps):
                call(number)
            fxsched.load_full_state_dict(again, state)
            fxsched.load_full_optimizer_state_dict(again, its_own, moments)
            for number in range(3, 5):
                call(number)
            same_state(again, its_own, (reference, its_optimizer))


def evaluate() -> None:
    """Evaluation sees new weights on all ranks, by any backend, after any step."""
    model, inputs = build_double("gpt")  # which has a tied weight
    reference = copy.deepcopy(model)
    optimizer, its_optimizer = adamw(model), adamw(reference)
    its_call = in_eager(reference, its_optimizer, inputs)
    program, loop = (way(model, optimizer, inputs, spread()) for way in WAYS.values())
    backends = {
        "own": fxsched.backend(spread()),
        "other": fxsched.backend(schedules.gpipe(2, B)),
        "stepping": fxsched.backend(spread(), optimizer=optimizer),
    }
    for number, call in enumerate((loop, loop, program, loop, program)):
        call(number)
        its_call(number)
        with torch.no_grad():
            wanted = sum(
                reference(*part)
                for part in zip(*(x.chunk(B) for x in inputs), strict=True)
            )
            for backend in backends.values():
                torch._dynamo.reset()
                close(torch.compile(model, backend=backend)(*inputs), wanted / B)
    same_state(model, optimizer, (reference, its_optimizer))


def harmless() -> None:
    """What a loop that was not changed does besides."""
    model, inputs = build()
    reference = copy.deepcopy(model)
    optimizer, its_optimizer = adamw(model), adamw(reference)
    call = in_program(model, optimizer, inputs, spread())
    its_call = in_eager(reference, its_optimizer, inputs)
    both = optimizer, its_optimizer
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in both]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            call(number)
            optimizer.zero_grad()
            optimizer.step()
            its_call(number)
            for scheduler in schedulers:
                scheduler.step()
    same_state(model, optimizer, (reference, its_optimizer))
    step = torch.compile(model, backend=fxsched.backend(spread(), optimizer=optimizer))
    loss = step(*inputs)
    refused(loss.backward, "leave out backward() and optimizer.step()")
    step(*inputs)


class Cube(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(3).mean()


def skip() -> None:
    """An update with a gradient that isn't finite is skipped by all ranks alike."""
    model, reference = Cube(), Cube()
    optimizer, its_optimizer = adamw(model), adamw(reference)
    backend = fxsched.backend(spread(), optimizer=optimizer, skip_nonfinite=True)
    step = torch.compile(model, backend=backend)
    x = torch.randn(
        4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    huge = x.clone()
    huge[0, 0] = 1e300
    before = copy.deepcopy(model.state_dict())
    assert not step(huge).isfinite()
    close(dict(model.state_dict()), dict(before))
    step(x)
    (reference(x[:2]) / B).backward()
    (reference(x[2:]) / B).backward()
    its_optimizer.step()
    same_state(model, optimizer, (reference, its_optimizer))


def of_type(dtype: torch.dtype) -> tuple[nn.Module, Batch]:
    model, inputs = build()
    return model.to(dtype), tuple(each.to(dtype) for each in inputs)


def bits(dtype: torch.dtype) -> None:
    """clip_grad_norm= has the bits of torch's on the same gradients, everywhere."""
    found = []
    cases: tuple[tuple[Schedule, dict[str, Any]], ...] = (
        (spread(), {}),
        (spread(), {"transport": "threads"}),
        (schedules.ddp(2), {}),
        (schedules.ddp(2), {"transport": "threads"}),
    )
    for schedule, options in cases:
        model, inputs = of_type(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        backend = fxsched.backend(
            schedule, optimizer=optimizer, clip_grad_norm=0.01, **options
        )
        step = torch.compile(model, backend=backend)
        for number in range(2):
            step(*batch(inputs, number))
        found.append(dict(fxsched.full_state_dict(model)))
    model, inputs = of_type(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(2):
        optimizer.zero_grad()
        for part in zip(*(x.chunk(B) for x in batch(inputs, number)), strict=True):
            (model(*part) / B).backward()
        clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    for other in found:
        torch.testing.assert_close(other, dict(model.state_dict()), rtol=0, atol=0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for way in WAYS:
        resume(way)
    evaluate()
    harmless()
    skip()
    for dtype in (torch.float32, torch.float64):
        bits(dtype)
    print(f"rank {dist.get_rank()}: state of updates")
    dist.destroy_process_group()
