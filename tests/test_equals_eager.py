"""Training by any schedule equals eager PyTorch on the same microbatches."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor

import fxsched
from tests.cases import (
    BRANCHING,
    MICROBATCHES,
    MODELS,
    SCHEDULES,
    Result,
    assert_equal,
    build,
    eager_step,
    train,
)

OPTIMIZERS = ("sgd", "adamw")


@cache
def eager(name: str) -> dict[str, Result]:
    results = {}
    for optimizer in OPTIMIZERS:
        model, inputs = build(name)

        def step(model=model, inputs=inputs) -> Tensor:
            return eager_step(model, inputs, MICROBATCHES)

        results[optimizer] = train(model, step, optimizer)
    return results


def compiled(name: str, schedule: fxsched.Schedule, **options: object) -> None:
    """Trains once with each optimizer, from the same start, and compares."""
    model, inputs = build(name)
    start = copy.deepcopy(model.state_dict())
    run = torch.compile(model, backend=fxsched.backend(schedule, **options))

    def step() -> Tensor:
        loss = run(*inputs)
        loss.backward()
        return loss

    for optimizer in OPTIMIZERS:
        model.load_state_dict(start)
        found = train(model, step, optimizer)
        assert_equal(found, eager(name)[optimizer])


@pytest.mark.parametrize("order", ["static", "dynamic"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_threads_equal_eager(name: str, schedule: str, order: str) -> None:
    compiled(name, SCHEDULES[schedule](), order=order)


@pytest.mark.parametrize("schedule", ["graph", "fslpp", "random"])
@pytest.mark.parametrize("name", BRANCHING)
def test_models_with_many_branches_equal_eager(name: str, schedule: str) -> None:
    compiled(name, SCHEDULES[schedule]())


@pytest.mark.parametrize("schedule", ["one_f_one_b", "apart"])
@pytest.mark.parametrize("name", ["mlp", "two_tower"])
def test_recomputing_forward_in_backward_equals_eager(name: str, schedule: str) -> None:
    compiled(name, SCHEDULES[schedule](), carry="recompute")


@pytest.mark.parametrize(
    ("name", "schedule"), [("mlp", "one_f_one_b"), ("two_tower", "fslpp")]
)
def test_inductor_stages_equal_eager(name: str, schedule: str) -> None:
    compiled(name, SCHEDULES[schedule](), stage_compiler="inductor")


@pytest.mark.parametrize("schedule", ["ddp", "gpipe", "one_f_one_b"])
def test_same_order_of_additions_gives_the_same_bits(schedule: str) -> None:
    model, inputs = build("mlp")
    run = torch.compile(model, backend=fxsched.backend(SCHEDULES[schedule]()))
    loss = run(*inputs)
    loss.backward()
    wanted = eager("mlp")["sgd"]
    assert torch.equal(loss.detach(), wanted.losses[0])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, wanted.gradients[name]), name
