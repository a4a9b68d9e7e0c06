"""What fxsched changes of Dynamo, and for whom: for its own compilations alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx.experimental._config as shapes
from torch import Tensor, fx, nn

import fxsched
from fxsched import schedules

NAMES = (
    "recompile_limit",
    "accumulated_recompile_limit",
    "fail_on_recompile_limit_hit",
    "specialize_float",
)


def settings() -> list[object]:
    """Dynamo's settings as the caller finds them."""
    values = [getattr(torch._dynamo.config, name) for name in NAMES]
    return [*values, shapes.use_duck_shape]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.second(torch.relu(self.first(x)) * scale).mean()


def gradients(step: Callable[..., Tensor], model: nn.Module, scale: float) -> Any:
    """The loss and all gradients of one call."""
    model.zero_grad()
    loss = step(torch.arange(12.0).view(4, 3), scale)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_settings_stay_as_they_were() -> None:
    before, callbacks = settings(), list(torch._dynamo.callback_handler.start_callbacks)
    model = Net()
    step = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 2)))
    gradients(step, model, 1.0)
    assert settings() == before
    assert list(torch._dynamo.callback_handler.start_callbacks) == callbacks


def test_another_backend_compiles_with_its_own_settings() -> None:
    seen = []

    def other(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(settings())
        return gm.forward

    before, model = settings(), Net()
    ours = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 2)))
    gradients(ours, model, 1.0)
    gradients(torch.compile(model, backend=other), model, 1.0)
    assert seen and all(each == before for each in seen)


def test_a_float_of_another_backend_is_compiled_once() -> None:
    graphs = []

    def other(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    fxsched.backend(schedules.gpipe(2, 2))
    compiled = torch.compile(lambda x, scale: x * scale, backend=other)
    for scale in (0.5, 1.5, 2.5, 3.5):
        compiled(torch.ones(4), scale)
    assert len(graphs) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("first", ["here", "there"])
def test_a_second_thread_plans_too(first: str) -> None:
    """Past the limit of Dynamo's own settings, which a new thread starts with."""
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    backend = fxsched.backend(schedules.gpipe(2, 2))
    step = torch.compile(model, backend=backend)
    scales = [0.5 + i for i in range(12)]
    if first == "here":
        gradients(step, model, 0.25)
    rows, plans = [], []

    def train() -> None:
        for scale in scales:
            backend.plan = None
            rows.append(gradients(step, model, scale))
            plans.append(backend.plan)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert all(plan is not None for plan in plans) and len(plans) == len(scales)
    for scale, row in zip(scales, rows, strict=True):
        torch.testing.assert_close(row, gradients(reference, reference, scale))
