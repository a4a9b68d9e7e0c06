"""The optimizer in the program: losses and parameters equal those of the plain loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fxsched
from fxsched import PlanError, schedules
from tests.cases import MICROBATCHES
from tests.traced_once import Switch
from tests.train_all import LOOP, compare
from tests.updates import (
    OPTIMIZERS,
    SCHEDULES,
    TOLERANCE,
    adamw,
    batches,
    build_double,
    eager,
)


@pytest.fixture(autouse=True, scope="module")
def _fresh_dynamo() -> Iterator[None]:
    """After the file, whose schedules share what Dynamo has traced."""
    yield
    torch._dynamo.reset()
    traced.cache_clear()


Trained = tuple[list[float], nn.Module]


def same(one: Trained, other: Trained) -> None:
    assert_close(one[0], other[0], **TOLERANCE)
    mine, others = dict(one[1].state_dict()), dict(other[1].state_dict())
    assert_close(mine, others, **TOLERANCE)


@cache
def traced(name: str) -> tuple[nn.Module, nn.Module, tuple[Tensor, ...], Switch]:
    """A model as it starts, the same as Dynamo traces it once, and its batch."""
    model, inputs = build_double(name)
    first = fxsched.backend(schedules.gpipe(2, 4), transport="threads")
    return copy.deepcopy(model), model, inputs, Switch(model, first)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["mlp", "gpt", "two_tower", "unet"])
def test_equals_the_plain_loop(name: str, schedule: str) -> None:
    start, model, inputs, switch = traced(name)
    made = SCHEDULES[schedule]()
    every = made.update_every or MICROBATCHES
    optimizer = list(OPTIMIZERS.values())[len(name + schedule) % len(OPTIMIZERS)]
    model.load_state_dict(start.state_dict())
    options: Any = {"transport": "threads", "optimizer": optimizer(model)}
    with fxsched.backend(made, **options) as backend:
        losses = [switch(backend, *batch).item() for batch in batches(inputs)]
    same((losses, model), eager(start, optimizer, inputs, every))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    [("gpt", "fsdp"), ("two_tower", "spread"), ("unet", "zb_h1"), ("gpt", "zero2")],
)
def test_the_loop_steps_as_the_plain_one(name: str, schedule: str) -> None:
    model, inputs = build_double(name)
    compare(model, SCHEDULES[schedule](), inputs, adamw, LOOP)


def test_a_weighted_loss_is_of_one_update() -> None:
    schedule = replace(schedules.gpipe(2, 4), update_every=2)
    with pytest.raises(PlanError, match="weighs rows over the whole batch"):
        fxsched.backend(schedule, loss_reduction="weighted")


def test_updates_need_an_optimizer() -> None:
    schedule = replace(schedules.gpipe(2, 4), update_every=2)
    model, inputs = build_double("mlp")
    step = torch.compile(model, backend=fxsched.backend(schedule, transport="threads"))
    with pytest.raises(PlanError, match=r"give it the optimizer, backend\(schedule"):
        step(*inputs)
    with pytest.raises(PlanError, match=r"clip_grad_norm= is about updates"):
        fxsched.backend(schedule, clip_grad_norm=1.0)


@pytest.mark.parametrize("every", [3, 0, -1, True, 2.0])
def test_an_update_is_for_a_part_of_the_microbatches(every: Any) -> None:
    with pytest.raises(PlanError, match=r"divides the 4 microbatches, or None"):
        replace(schedules.gpipe(2, 4), update_every=every)


@pytest.mark.parametrize(
    ("u", "message"),
    [
        (lambda s, b: 7, r"u\(\d, 3\) returned 7; return a worker, 0\.\.1"),
        (lambda s, b: "a", r"u\(\d, 3\) returned 'a'; return a worker"),
        (lambda s, b: [][b], r"u\(\d, 3\) raised IndexError"),
    ],
)
def test_u_names_a_worker(u: Any, message: str) -> None:
    model, inputs = build_double("mlp")
    with pytest.raises(PlanError, match=message):
        fxsched.plan(model, replace(schedules.gpipe(2, 4), u=u), *inputs)


def test_the_state_of_a_stage_stays_on_one_worker() -> None:
    schedule = replace(schedules.gpipe(2, 4), update_every=2, u=lambda s, b: b // 2)
    model, inputs = build_double("mlp")
    with pytest.raises(PlanError, match="stays on one worker: return the same"):
        fxsched.plan(model, schedule, *inputs)
