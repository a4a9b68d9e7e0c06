"""The optimizer in the program: losses and parameters equal those of the plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fxsched
from fxsched import Schedule
from tests.cases import MICROBATCHES
from tests.updates import (
    OPTIMIZERS,
    SCHEDULES,
    TOLERANCE,
    batches,
    build_double,
    eager,
    momentum,
)


def trained(
    model: nn.Module,
    schedule: Schedule,
    inputs: tuple[Tensor, ...],
    made: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
    **options: Any,
) -> tuple[list[float], nn.Module]:
    model = copy.deepcopy(model)
    backend = fxsched.backend(
        schedule, transport="threads", optimizer=made(model), **options
    )
    step = torch.compile(model, backend=backend)
    losses = [step(*batch).item() for batch in batches(inputs)]
    backend.close()
    return losses, model


Trained = tuple[list[float], nn.Module]


def same(one: Trained, other: Trained) -> None:
    assert_close(one[0], other[0], **TOLERANCE)
    mine, others = dict(one[1].state_dict()), dict(other[1].state_dict())
    assert_close(mine, others, **TOLERANCE)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["mlp", "gpt", "two_tower", "unet"])
def test_equals_the_plain_loop(name: str, schedule: str) -> None:
    model, inputs = build_double(name)
    made = SCHEDULES[schedule]()
    every = made.update_every or MICROBATCHES
    optimizer = list(OPTIMIZERS.values())[len(name + schedule) % len(OPTIMIZERS)]
    same(
        trained(model, made, inputs, optimizer),
        eager(model, optimizer, inputs, every),
    )
