"""State that forward reads and writes has one new version a call, eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fxsched
from fxsched import Schedule, schedules
from tests.started_ranks import run_ranks
from tests.state_models import STATEFUL, batch
from tests.traced_once import Switch
from tests.whole_batch import drawn

SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "1f1b": lambda workers: schedules.one_f_one_b(workers, 4),
    "ddp": lambda workers: schedules.ddp(workers, 4),
    "fsdp": lambda workers: schedules.fsdp(workers, 4),
    "interleaved": lambda workers: schedules.interleaved(workers, 4),
    "random": drawn,
}


@pytest.fixture(autouse=True, scope="module")
def _fresh_dynamo() -> Iterator[None]:
    """After the file, whose schedules share what Dynamo has traced."""
    yield
    torch._dynamo.reset()
    traced.cache_clear()


def train(step: Callable[..., Any], model: nn.Module) -> list[Any]:
    """Losses of three steps of SGD, and the whole state."""
    torch.manual_seed(1)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = step(*batch())
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return [losses, fxsched.full_state_dict(model)]


@cache
def traced(kind: str) -> tuple[nn.Module, Switch, nn.Module, list[Any]]:
    """A model as it starts, as Dynamo traces it once for all schedules, and trained."""
    torch.manual_seed(0)
    model = STATEFUL[kind]()
    switch = Switch(model, fxsched.backend(schedules.ddp(2, 4)))
    start, eager = copy.deepcopy(model), copy.deepcopy(model)
    return start, switch, model, train(eager, eager)


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_state_is_eagers_after_each_call(kind: str, schedule: str) -> None:
    start, switch, model, wanted = traced(kind)
    with fxsched.backend(SCHEDULES[schedule](2)) as backend:
        model.load_state_dict(start.state_dict())
        found = train(partial(switch, backend), model)
    assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_ranks_keep_one_version() -> None:
    done = run_ranks(2, "tests.ranks_state_versions")
    assert done.stdout.count("rank 1: ") == 12, done.stdout
