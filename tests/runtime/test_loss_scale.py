"""Float16: B starts from the scaler's scale, so that small gradients stay."""

from __future__ import annotations

import copy
import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fxsched
from fxsched import PlanError, schedules
from fxsched.ir.loss_scale import hand_over, overflowed
from fxsched.option_checks import SUM_TYPES
from fxsched.params.clip import on_cpu

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


class Called(TorchDispatchMode):
    """Notes the operations that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.waits = 0  # numbers that are read, and copies to the host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, host = func._schema.name, torch.device("cpu")
        to_host = name == "aten::_to_copy" and (kwargs or {}).get("device") == host
        self.waits += name == "aten::_local_scalar_dense" or to_host
        self.names[name] += 1
        return func(*args, **(kwargs or {}))


def some_gradients(device: str) -> list[Tensor | None]:
    return [torch.ones(3, device=device), None, torch.ones(2, 2, device=device)]


def test_on_a_cpu_gradients_times_1_are_not_copied() -> None:
    gradients, one = some_gradients("cpu"), torch.ones(())
    with Called() as called:
        given = hand_over([*gradients], one, None, False)
    assert called.names == {"aten::_local_scalar_dense": 1}
    assert all(a is b for a, b in zip(given, gradients, strict=True))


def test_on_another_device_no_number_is_read_and_one_copy_at_a_time_is_kept() -> None:
    """Reading a number there raises, as the meta device has none."""
    gradients, one = some_gradients("meta"), torch.ones((), device="meta")
    before = weakref.ref(gradients[0])
    with Called() as called:
        given = hand_over(gradients, one, None, False)
    assert called.names == {"aten::mul": 2}
    assert given is gradients and before() is None
    assert gradients[1] is None and gradients[2].shape == (2, 2)


def test_a_call_with_a_scaler_waits_for_the_device_twice() -> None:
    """For the scale that backward() hands in, and for whether anything overflowed."""
    with Called() as called:
        given = hand_over(some_gradients("cpu"), torch.tensor(8.0), 8.0, True)
        assert not overflowed([*given, torch.ones(0)])
    assert called.waits == 2


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_what_is_not_finite_is_found_in_any_gradient(
    wrong: float, dtype: torch.dtype
) -> None:
    largest = torch.full((4,), torch.finfo(torch.float16).max).half()
    assert not overflowed([largest, None, torch.ones(3, dtype=dtype)])
    assert overflowed([largest, None, torch.tensor([0.0, wrong], dtype=dtype)])
    assert not overflowed([None])


def test_norms_of_many_parameters_come_from_a_device_by_one_copy() -> None:
    with FakeTensorMode(), Called() as called:
        numbers = [torch.ones((), device="cuda", dtype=d) for d in SUM_TYPES]
        assert [n.dtype for n in on_cpu(numbers)] == [*SUM_TYPES]
    assert called.waits == 1
    exact = [torch.tensor(0.1, dtype=dtype) for dtype in SUM_TYPES]
    assert [n.item() for n in on_cpu(exact)] == [n.item() for n in exact]
    assert on_cpu([]) == []
