"""What a backend keeps, how much of it, and when it lets go."""

from __future__ import annotations

import gc
import importlib
import linecache
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules


class Net(nn.Module):
    def __init__(self, loss: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.loss = nn.Linear(3, 4), nn.Linear(4, 1), loss

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(torch.relu(self.first(x)))
        return out.mean() if self.loss else out


def trained(step: Callable[[Tensor], Tensor], model: nn.Module, size: int) -> Any:
    """The loss of a call and all gradients."""
    model.zero_grad()
    loss = step(torch.linspace(-1.0, 1.0, 3 * size).view(size, 3))
    loss.sum().backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def workers() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("fxsched")}


def ended(threads: set[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(10)
    return not any(thread.is_alive() for thread in threads)


def sources() -> set[str]:
    return {name for name in linecache.cache if name.startswith("<fxsched")}


def collect() -> None:
    for _ in range(2):  # what one pass frees may hold what the next one does
        gc.collect()


@pytest.mark.slow
def test_the_least_recently_called_plan_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.import_module("fxsched.backend"), "PLANS", 2)
    model = Net()
    backend = fxsched.backend(schedules.gpipe(2, 2))
    step = torch.compile(model, backend=backend)
    plans: dict[int, Any] = {}
    anew = []
    for size in (4, 8, 4, 12, 4, 8):
        torch.testing.assert_close(
            trained(step, model, size), trained(model, model, size)
        )
        anew.append(plans.get(size) is not backend.plan)
        plans[size] = backend.plan
    assert anew == [True, True, False, True, False, True]


@pytest.mark.slow
def test_a_closed_backend_holds_nothing_and_says_so() -> None:
    before, model = workers(), Net()
    with fxsched.backend(schedules.gpipe(2, 2), profile=True) as backend:
        step = torch.compile(model, backend=backend)
        trained(step, model, 4)
        mine = workers() - before
        assert len(mine) == 2
    assert ended(mine)
    assert backend.plan is not None
    assert len(backend.timeline) == len(backend.plan.jobs)
    with pytest.raises(PlanError, match="this backend is closed; compile the model wi"):
        step(torch.ones(4, 3))
    backend.close()  # once more does nothing
    again = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 2)))
    torch.testing.assert_close(trained(again, model, 4), trained(model, model, 4))


def test_a_backend_is_closed_after_backward() -> None:
    with fxsched.backend(schedules.gpipe(2, 2)) as backend:
        step = torch.compile(Net(loss=False), backend=backend)
        out = step(torch.ones(4, 3))
    with pytest.raises(PlanError, match="closed between the call and its backward"):
        out.sum().backward()


def test_threads_and_plans_go_with_the_compiled_function() -> None:
    collect()
    before, files = workers(), sources()
    model, backend = Net(loss=False), fxsched.backend(schedules.gpipe(2, 2))
    step = torch.compile(model, backend=backend)
    out = step(torch.linspace(-1.0, 1.0, 12).view(4, 3))
    mine = workers() - before
    del step
    collect()
    out.sum().backward()  # what is under way still ends
    wanted = [p.grad.clone() for p in model.parameters()]
    torch.testing.assert_close(wanted, trained(model, model, 4)[1:])
    del out
    backend.plan = None
    collect()
    assert ended(mine) and sources() <= files
    again = torch.compile(model, backend=backend)
    torch.testing.assert_close(trained(again, model, 4), trained(model, model, 4))


@pytest.mark.slow
def test_all_goes_with_the_backend() -> None:
    collect()
    before, files = workers(), sources()

    def sweep() -> list[weakref.ref[Any]]:
        kept: list[weakref.ref[Any]] = []
        for schedule in (schedules.gpipe(2, 2), schedules.one_f_one_b(2, 2)):
            model, backend = Net(), fxsched.backend(schedule)
            trained(torch.compile(model, backend=backend), model, 4)
            kept += map(weakref.ref, (model, backend, *model.parameters()))
        return kept

    kept = sweep()
    mine = workers() - before
    torch._dynamo.reset()
    collect()
    assert all(each() is None for each in kept)
    assert ended(mine) and sources() <= files


def test_dynamo_resets_no_backend_of_ours() -> None:
    """reset() of a backend is one that all ranks call together."""
    called = []
    model, backend = Net(), fxsched.backend(schedules.gpipe(2, 2))
    vars(backend)["reset"] = lambda: called.append(True)
    trained(torch.compile(model, backend=backend), model, 4)
    torch._dynamo.reset()
    assert not called
