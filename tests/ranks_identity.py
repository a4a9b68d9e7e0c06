"""What each rank of tests/runtime/test_identity.py does: python -m
tests.ranks_identity."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules
from tests.runtime.test_identity import Root, Ways


def say(name: str, text: object) -> None:
    sys.stdout.write(f"rank {dist.get_rank()}: {name}: {text}\n")
    sys.stdout.flush()


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=fxsched.backend(gpipe, **options))


def assert_own(model: nn.Module, reference: nn.Module) -> int:
    """Gradients that this rank has are the reference's; how many there are."""
    pairs = [
        (own.grad, other.grad)
        for own, other in zip(model.parameters(), reference.parameters(), strict=True)
        if own.grad is not None
    ]
    for own, other in pairs:
        torch.testing.assert_close(own, other)
    return len(pairs)


def train(run: Any, reference: nn.Module, *inputs: Tensor) -> None:
    loss, wanted = run(*inputs), reference(*inputs)
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    wanted.backward()


def ways() -> None:
    """Modules and tensors that are reached in every way."""
    model = Ways()
    reference = copy.deepcopy(model)
    run = compiled(model)
    for _ in range(2):
        train(run, reference, x)
    torch.testing.assert_close(model.tables[0].grad, reference.tables[0].grad)
    say("ways", assert_own(model, reference))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).pow(2).mean()


def tied_later() -> None:
    """A parameter becomes another one's between two calls."""
    model = Tied()
    reference = copy.deepcopy(model)
    run = compiled(model, stages=["second"])
    train(run, reference, x)
    for each in (model, reference):
        each.second.weight = each.first.weight
    train(run, reference, x)
    say("tied", assert_own(model, reference))


def two_of_a_class() -> None:
    """Models of one class share a backend; eval of one comes before all else."""
    student, teacher = (Root(*(nn.Linear(4, 4) for _ in range(3))) for _ in range(2))
    references = copy.deepcopy((student, teacher))
    backend = fxsched.backend(gpipe)
    runs = [torch.compile(model, backend=backend) for model in (student, teacher)]
    with torch.no_grad():
        torch.testing.assert_close(runs[1](x), references[1](x))
    for run, reference in zip(runs, references, strict=True):
        train(run, reference, x)
        with torch.no_grad():
            torch.testing.assert_close(run(x), reference(x))
    counts = map(assert_own, (student, teacher), references)
    say("two", sum(counts))


def slices() -> None:
    """Batches that lie in one tensor, at other places each, share a plan."""
    model = Root(nn.Linear(4, 4), nn.Linear(4, 4))
    reference = copy.deepcopy(model)
    backend = fxsched.backend(gpipe, stages=["blocks.1"])
    run = torch.compile(model, backend=backend)
    for part in torch.randn(4, 8, 4):
        train(run, reference, part)
        with torch.no_grad():
            torch.testing.assert_close(run(part), reference(part))
    say("slices", f"{len(backend._steps)} plans, {assert_own(model, reference)} own")


def copies() -> None:
    """A compiled model is copied before a step, and no more after it."""
    run = compiled(Root(nn.Linear(4, 4), nn.Linear(4, 4)), stages=["blocks.1"])
    again = copy.deepcopy(run)
    train(again, copy.deepcopy(run._orig_mod), x)
    try:
        copy.deepcopy(again)
    except PlanError as error:
        say("copies", error)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    gpipe, x = schedules.gpipe(2, 2), torch.randn(8, 4)
    ways()
    tied_later()
    two_of_a_class()
    slices()
    copies()
    dist.destroy_process_group()
