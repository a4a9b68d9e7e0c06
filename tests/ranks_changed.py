"""What each rank of tests/params/test_changed.py does: python -m tests.ranks_changed.

Between steps a user moves, casts, replaces, freezes or loads parameters, or goes on
with another backend; then trains on. All is as in eager PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.testing import assert_close

import fxsched
from fxsched import Schedule, schedules
from fxsched.params.record import record_of
from tests.ranks_parameters import batch, build

Change = Callable[["Training"], None]


def spread() -> Schedule:
    """Data parallelism in which each rank updates half of the stages."""
    return replace(schedules.ddp(2, 2), stages=2, u=lambda s, b: s % 2)


def sharded() -> Schedule:
    return schedules.sharded(schedules.gpipe(1, 2), 2)


SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "1f1b": lambda: schedules.one_f_one_b(2, 2),
    "fsdp": lambda: schedules.fsdp(2, 2),
    "ddp": lambda: schedules.ddp(2, 2),
    "spread": spread,
    "shards": sharded,
}


class Training:
    """A model that is trained by a schedule, or in eager mode (None)."""

    def __init__(self, schedule: Schedule | None, in_program: bool) -> None:
        self.model: nn.Module = build()
        self.schedule, self.in_program = schedule, in_program
        self.dtype, self.losses = torch.float32, list[Tensor]()
        self.optimizer = self.made()
        self.compile(schedule)

    def made(self) -> Optimizer:
        return SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def compile(self, schedule: Schedule | None) -> None:
        """Goes on by a schedule, with a backend of its own."""
        self.run: Any = Loss(self.model)
        if schedule is None:
            return
        options: dict[str, Any] = {"stages": ["model.2"]} if schedule.stages else {}
        if self.in_program:
            options["optimizer"] = self.optimizer
        if schedule.shards > 1:
            options["shards"] = "auto"
        self.backend = fxsched.backend(schedule, **options)
        self.run = torch.compile(self.run, backend=self.backend)

    def step(self) -> None:
        x = batch().to(self.dtype)
        loss = self.run(x)
        if self.schedule is None or not self.in_program:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.detach().double())

    def state(self) -> dict[str, Tensor]:
        """The whole state, as plain PyTorch has it."""
        if self.schedule is None:
            return self.model.state_dict()
        return dict(fxsched.full_state_dict(self.model))

    def renew(self) -> None:
        """An optimizer of the parameters that there are now."""
        self.optimizer = self.made()
        if self.in_program:
            self.compile(self.schedule)


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


def cast(training: Training) -> None:
    training.model.double()
    training.dtype = torch.float64


def assigned(training: Training) -> None:
    state = {name: value * 0.5 for name, value in training.state().items()}
    training.model.load_state_dict(state, assign=True)
    training.renew()


def replaced(training: Training) -> None:
    layer: Any = training.model.get_submodule("2")
    layer.weight = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6))
    training.renew()


def frozen(training: Training) -> None:
    training.model.get_parameter("2.weight").requires_grad_(False)


def thawed(training: Training) -> None:
    frozen(training)
    training.step()
    training.model.get_parameter("2.weight").requires_grad_(True)


def another(training: Training) -> None:
    """Goes on with another backend, by another schedule, and then with the first."""
    first = training.schedule
    whole = first is not None and first.shards == 1
    training.compile(schedules.ddp(2, 2) if whole else first)
    training.step()
    training.compile(first)


CHANGES = (cast, assigned, replaced, thawed, another)


def trained(schedule: Schedule | None, change: Change, in_program: bool) -> Training:
    torch._dynamo.reset()
    training = Training(schedule, in_program)
    training.step()
    training.step()
    change(training)
    training.step()
    training.step()
    return training


def holds(name: str, change: Change, in_program: bool) -> None:
    """Losses and parameters are eager's, and ranks hold what they keep."""
    rank = dist.get_rank()
    wanted = trained(None, change, in_program)
    found = trained(SCHEDULES[name](), change, in_program)
    assert_close(found.losses, wanted.losses)
    assert_close(found.state(), dict(wanted.state()))
    for parameter in found.model.parameters() if name == "1f1b" else ():
        kept = rank in record_of(parameter).owners
        assert kept == (parameter.untyped_storage().nbytes() >= parameter.nbytes)
    found.backend.close()


def main(names: list[str]) -> None:
    for name in names or SCHEDULES:
        for change in CHANGES:
            for in_program in (False, True):
                holds(name, change, in_program)
    print(f"rank {dist.get_rank()}: changes hold", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1:])
    dist.destroy_process_group()
