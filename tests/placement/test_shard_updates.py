"""The optimizer in the program of shards: each steps its parts of weights, and losses,
parameters and the optimizer's state are those of the plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.testing import assert_close

import fxsched
from fxsched import PlanError, Schedule, schedules
from fxsched.schedules import sharded
from tests.ranks_versions import replayed, rows
from tests.shard_models import UPDATING
from tests.updates import TOLERANCE, adamw, batches, build_double, eager, momentum

Made = Callable[[nn.Module], Optimizer]


def in_shards() -> Schedule:
    return sharded(schedules.gpipe(1, 2), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "made", "options"),
    [
        ("mlp", "1f1b in two updates", adamw, {"clip_grad_norm": 0.05}),
        ("mlp", "zb_h1", momentum, {}),
        ("mlp", "copies of zero2", adamw, {"clip_grad_norm": 0.05}),
        ("mlp", "random u", adamw, {"order": "dynamic", "skip_nonfinite": True}),
    ],
)
def test_updates_in_shards_equal_the_plain_loop(
    name: str, schedule: str, made: Made, options: dict[str, Any]
) -> None:
    model, inputs = build_double(name)
    plan, mine = UPDATING[schedule](2), copy.deepcopy(model)
    others: list[Optimizer] = []
    optimizer = made(mine)
    backend = fxsched.backend(plan, transport="threads", optimizer=optimizer, **options)
    with backend:
        step = torch.compile(mine, backend=backend)
        losses = [step(*batch).item() for batch in batches(inputs)]

    def noted(reference: nn.Module) -> Optimizer:
        others.append(made(reference))
        return others[0]

    every, clip = plan.update_every or 4, options.get("clip_grad_norm")
    wanted, reference = eager(model, noted, inputs, every, clip=clip)
    assert_close(losses, wanted, **TOLERANCE)
    assert_close(dict(mine.state_dict()), dict(reference.state_dict()), **TOLERANCE)
    assert_close(optimizer.state_dict(), others[0].state_dict(), **TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        sharded(schedules.pipedream(2, 8), 2),
        sharded(schedules.pipemare(2, 8, annealed=12), 2),
    ],
    ids=str,
)
def test_stale_shards_equal_their_replay(schedule: Schedule) -> None:
    model, inputs = build_double("mlp")
    mine, given = copy.deepcopy(model), rows(inputs, schedule)
    backend = fxsched.backend(schedule, transport="threads", optimizer=adamw(mine))
    with backend:
        step = torch.compile(mine, backend=backend)
        losses = [step(*batch).item() for batch in given]
    assert backend.plan is not None
    backend.plan.check()
    assert_close(losses, replayed(backend.plan, model, given), **TOLERANCE)
    assert_close(dict(mine.state_dict()), dict(model.state_dict()), **TOLERANCE)


@pytest.mark.slow
def test_state_is_whole_between_calls_and_rates_may_change() -> None:
    """Each call of the program is followed by one of the plain loop, in turns."""
    model, inputs = build_double("mlp")
    plain = copy.deepcopy(model)
    optimizer, other = adamw(model), adamw(plain)
    backend = fxsched.backend(in_shards(), transport="threads", optimizer=optimizer)
    step = torch.compile(model, backend=backend)
    rates = [
        torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, other)
    ]
    for number in range(4):
        for its, its_optimizer in ((plain, other), (model, optimizer)):
            if its is model and number % 2:
                step(*inputs)
                continue
            its(*inputs).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
        for rate in rates:
            rate.step()
        state = copy.deepcopy(optimizer.state_dict())
        assert_close(state, other.state_dict(), **TOLERANCE)
        optimizer.load_state_dict(state)
    assert_close(dict(model.state_dict()), dict(plain.state_dict()), **TOLERANCE)


def test_an_update_that_is_not_finite_is_skipped_by_all_shards() -> None:
    model, (x, y) = build_double("mlp")
    optimizer = adamw(model)
    backend = fxsched.backend(
        in_shards(), transport="threads", optimizer=optimizer, skip_nonfinite=True
    )
    step = torch.compile(model, backend=backend)
    step(x, y)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(x, torch.full_like(y, torch.inf))
    after = model.state_dict(), optimizer.state_dict()
    assert_close(after, before, rtol=0, atol=0)


@pytest.mark.slow
def test_an_optimizer_that_needs_whole_weights_is_refused() -> None:
    model, inputs = build_double("mlp")
    optimizer = torch.optim.Adafactor(model.parameters(), 0.1)
    with pytest.raises(PlanError, match="Adafactor steps the parts of a weight other"):
        fxsched.plan(model, in_shards(), *inputs, optimizer=optimizer)


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        (schedules.local_sgd(2, 1), {}, r"shards=2\) doesn't go with average_every="),
        (
            schedules.parameter_server(3, asynchronous=True),
            {"order": "dynamic"},
            r"shards=2\) doesn't go with updates in order of arrival \(take order='st",
        ),
    ],
)
def test_what_updates_in_shards_do_not_go_with_is_said(
    schedule: Schedule, options: dict[str, Any], message: str
) -> None:
    optimizer = momentum(nn.Linear(2, 2))
    with pytest.raises(PlanError, match=message):
        fxsched.backend(sharded(schedule, 2), optimizer=optimizer, **options)


@pytest.mark.slow
def test_shards_of_copies_share_the_optimizer_each_with_its_own() -> None:
    copies = schedules.replicate(sharded(schedules.gpipe(1, 2), 2), 2, zero=2)
    model, inputs = build_double("mlp")
    plan = fxsched.plan(model, copies, *inputs, optimizer=adamw(model))
    for group in plan.groups:
        parts = [
            plan.parts[s.input].number for s in group.state if s.input in plan.parts
        ]
        if parts:
            assert {worker % 2 for worker in group.updaters} == set(parts)
