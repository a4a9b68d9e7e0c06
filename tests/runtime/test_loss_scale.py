"""Float16: B starts from the scaler's scale, so that small gradients stay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules

MICROBATCHES = 4


class Faint(nn.Module):
    """Its gradients are below what float16 has, unless they are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(torch.tanh(self.first(x))) * 1e-7).float().mean()


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    backend = fxsched.backend(schedules.zb_h1(2, MICROBATCHES), **options)
    return torch.compile(model, backend=backend)


def half() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.float16)


@pytest.fixture
def model() -> Faint:
    torch.manual_seed(0)
    return Faint()


def scaled_eager(model: nn.Module, x: Tensor, scale: float) -> list[Tensor]:
    model.zero_grad()
    for part in x.chunk(MICROBATCHES):
        with half():
            loss = model(part)
        (loss * (scale / MICROBATCHES)).backward()
    return [p.grad for p in model.parameters()]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


def test_a_scaler_that_is_handed_over_gives_eagers_gradients(model: Faint) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1)
    step = compiled(model, loss_scale=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for scale in (2.0**16, 2.0**17):
        x, reference = torch.randn(8, 8), copy.deepcopy(model)
        with half():
            loss = step(x)
        scaler.scale(loss).backward()
        wanted = scaled_eager(reference, x, scale)
        assert all(grad.count_nonzero() for grad in wanted)
        torch.testing.assert_close(gradients(model), wanted, rtol=1e-3, atol=1e-5)
        before = model.first.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(model.first.weight, before)
        optimizer.zero_grad()


def test_a_scale_that_was_not_known_is_an_error(model: Faint) -> None:
    step, x = compiled(model), torch.randn(8, 8)
    with half():
        loss = step(x)
    with pytest.raises(RuntimeError, match=r"scaled by 65536, .* loss_scale=scaler"):
        torch.amp.GradScaler("cpu").scale(loss).backward()
    with half():
        loss = step(x)
    (loss / 2).backward()  # accumulation of gradients: nothing flushes for it


def test_without_float16_gradients_are_multiplied(model: Faint) -> None:
    step, x = compiled(model), torch.randn(8, 8)
    (step(x) * 1024).backward()
    reference = copy.deepcopy(model)
    reference.zero_grad()
    (reference(x) * 1024).backward()
    torch.testing.assert_close(gradients(model), gradients(reference))


def test_a_number_or_a_function_gives_the_scale(model: Faint) -> None:
    x, found = torch.randn(8, 8), []
    for scale in (2.0**12, lambda: 2.0**12):
        model.zero_grad()
        with half():
            loss = compiled(model, loss_scale=scale)(x)
        (loss * 2.0**11).backward()
        found.append([grad.clone() for grad in gradients(model)])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    wanted = scaled_eager(copy.deepcopy(model), x, 2.0**12)
    torch.testing.assert_close(found[0], [grad / 2 for grad in wanted])


@pytest.mark.parametrize("scale", ["high", 0, -1.0, float("inf"), True])
def test_what_is_no_scale(scale: Any) -> None:
    with pytest.raises(PlanError, match=r"loss_scale=.* give the GradScaler, a number"):
        fxsched.backend(schedules.gpipe(2, 4), loss_scale=scale)


def test_a_function_that_gives_no_scale(model: Faint) -> None:
    with pytest.raises(PlanError, match="loss_scale gave 0; give a finite number"):
        compiled(model, loss_scale=lambda: 0)(torch.randn(8, 8))
