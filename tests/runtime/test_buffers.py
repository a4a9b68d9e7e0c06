"""What F writes into the model: once a call, as eager PyTorch on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules

MICROBATCHES = 4
ONE_BY_ONE = {  # one worker runs F of a stage
    "gpipe": schedules.gpipe(2, MICROBATCHES),
    "interleaved": schedules.interleaved(2, MICROBATCHES, stages=4),
    "zb_h1": schedules.zb_h1(2, MICROBATCHES),
}


class Model(nn.Module):
    """Two layers around what a model keeps and a step changes."""

    def __init__(self, learn: Callable[[Any, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("ema", torch.zeros(8))
        self.plain, self.many, self.calls = torch.ones(8), {"a": torch.zeros(())}, 0
        self.learn = learn

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        more = self.learn(self, hidden)
        loss = (self.second(hidden) * self.plain + self.ema).pow(2).mean()
        return loss if more is None else {"loss": loss, "more": more}

    def state(self) -> list[Any]:
        return [self.n, self.steps, self.ema, self.plain, self.many["a"], self.calls]


def count(model: Model, hidden: Tensor) -> None:
    model.n += 1
    model.steps = model.steps + 1


def average(model: Model, hidden: Tensor) -> None:
    model.ema = 0.9 * model.ema + 0.1 * hidden.detach().mean(0)


def plain(model: Model, hidden: Tensor) -> None:
    model.plain = model.plain * 0.5 + hidden.detach()[0]
    model.many["a"] = model.many["a"] * 2 + model.plain.sum()


def returned(model: Model, hidden: Tensor) -> Tensor:
    model.n += 1
    return model.n


def replaced(model: Model, hidden: Tensor) -> Tensor:
    model.ema = model.ema * 0.5 + hidden.detach().sum(0)
    return model.ema


LEARNS = (count, average, plain, returned, replaced)


def loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def check(model: Any, schedule: Any, calls: int = 3) -> None:
    """Calls a model both ways; its outputs, gradients and state are equal."""
    reference = copy.deepcopy(model)
    run = torch.compile(model, backend=fxsched.backend(schedule))
    for _ in range(calls):
        x = torch.randn(8, 8)
        found, wanted = run(x), reference(x)
        loss_of(found).backward()
        loss_of(wanted).backward()
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(model.state(), reference.state())
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
            mine.grad = other.grad = None


@pytest.mark.slow
@pytest.mark.parametrize("learn", LEARNS)
def test_state_has_one_new_value_a_call(learn: Any) -> None:
    ways = list(ONE_BY_ONE.values())
    check(Model(learn), ways[LEARNS.index(learn) % len(ways)])


def test_a_buffer_written_in_place_stays_the_tensor_it_was() -> None:
    model = Model(returned)
    before, run = model.n, None
    run = torch.compile(model, backend=fxsched.backend(ONE_BY_ONE["gpipe"]))
    found = run(torch.randn(8, 8))
    assert model.n is before and found["more"] is before


@pytest.mark.slow
def test_what_is_replaced_leaves_the_old_tensor_alone() -> None:
    model = Model(replaced)
    before, value = model.ema, model.ema.clone()
    run = torch.compile(model, backend=fxsched.backend(ONE_BY_ONE["gpipe"]))
    found = run(torch.randn(8, 8))
    assert found["more"] is model.ema and model.ema is not before
    assert torch.equal(before, value)
    assert dict(model.named_buffers())["ema"] is model.ema


class Largest(nn.Module):
    """Six layers, and a running mean of the whole batch's largest values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.register_buffer("ema", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        with torch.no_grad():
            self.ema.mul_(0.9).add_(0.1 * x.amax(0))
        return x.pow(2).mean()

    def state(self) -> list[Any]:
        return [self.ema]


@pytest.mark.parametrize("name, workers", [("zb_h1", 3), ("zb_h1", 4), ("zb_h2", 3)])
def test_strict_orders_plan_what_is_written_of_the_whole_batch(
    name: str, workers: int
) -> None:
    check(Largest(), schedules.LIBRARY[name](workers=workers, microbatches=4))


def grown(model: Model, hidden: Tensor) -> None:
    model.n = model.n + hidden.detach().mean(0)


@pytest.mark.slow
def test_new_values_may_have_another_shape() -> None:
    check(Model(grown), schedules.ddp(2, 4), calls=2)


def attached(model: Model, hidden: Tensor) -> None:
    model.ema = 0.9 * model.ema + 0.1 * hidden.mean(0)


def scattered(model: Model, hidden: Tensor) -> None:
    model.ema.mul_(0.9).add_(0.1 * hidden.detach().mean(0))


def test_state_that_would_be_part_of_gradients_is_refused() -> None:
    run = torch.compile(Model(attached), backend=fxsched.backend(ONE_BY_ONE["gpipe"]))
    match = r"(?s)ema gets a new value.*assign new_value.detach\(\)"
    with pytest.raises(PlanError, match=match):
        run(torch.randn(8, 8))


@pytest.mark.parametrize("learn", [average, scattered])
def test_workers_that_share_a_stage_write_what_eager_does(learn: Any) -> None:
    check(Model(learn), schedules.ddp(2, 4))


@pytest.mark.parametrize("learn", [average, scattered])
def test_what_workers_values_become_is_not_asked(learn: Any) -> None:
    backend = fxsched.backend(schedules.ddp(2, 4), buffers={"ema": "mean"})
    with pytest.raises(PlanError, match=r"writes ema once a call.*leave it out"):
        torch.compile(Model(learn), backend=backend)(torch.randn(8, 8))


def total(model: Model, hidden: Tensor) -> Tensor:
    model.n += hidden.detach().sum()
    model.steps = 2 + model.steps
    return model.n


def test_what_is_added_of_the_batch_is_that_of_the_whole_batch() -> None:
    check(Model(total), schedules.ddp(2, 4))


class Counters(nn.Module):
    """Integers that are more than counters: the place in a queue."""

    def __init__(self, turn: bool) -> None:
        super().__init__()
        self.layer, self.turn = nn.Linear(8, 8), turn
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.turn:
            self.place = (self.place + 2) % 3
        else:
            self.place += 2
            x = x * self.place
        return self.layer(x).pow(2).mean()

    def state(self) -> list[Any]:
        return [self.place]


@pytest.mark.slow
@pytest.mark.parametrize("turn", [False, True])
def test_what_does_not_come_of_the_batch_needs_no_stage_for_it(turn: bool) -> None:
    model, schedule = Counters(turn), schedules.ddp(2, 4)
    plan = fxsched.plan(model, schedule, torch.randn(8, 8))
    assert not any(joint for _, joint in plan.stages.nodes(data="joint"))
    check(model, schedule)


def workers_of(model: Any, x: Tensor) -> list[Any]:
    """What each of two workers has after every second microbatch."""
    copies = [copy.deepcopy(model) for _ in range(2)]
    with torch.no_grad():
        for i, part in enumerate(x.chunk(MICROBATCHES)):
            copies[i % 2](part)
    return copies


class Norms(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(3, 4, 1), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).pow(3).mean()


def test_running_statistics_of_microbatches_are_averaged_over_workers() -> None:
    model, x = Norms(nn.BatchNorm1d(4)), torch.randn(8, 3, 5)
    first, second = (each.norm for each in workers_of(model, x))
    backend = fxsched.backend(schedules.ddp(2, 4), batch_norm="microbatch")
    torch.compile(model, backend=backend)(x)
    for name in ("running_mean", "running_var"):
        found = getattr(model.norm, name)
        mean = (getattr(first, name) + getattr(second, name)) / 2
        torch.testing.assert_close(found, mean)
    assert model.norm.num_batches_tracked == 4


@pytest.mark.parametrize("old", [False, True])
def test_spectral_norm_goes_on_once_a_call(old: bool) -> None:
    way = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(way(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8))
    schedule = replace(schedules.gpipe(2, MICROBATCHES), stages=2)
    check(Squared(model), schedule, calls=2)


class Squared(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).pow(2).mean()

    def state(self) -> list[Any]:
        return list(self.buffers())


@pytest.mark.slow
def test_a_number_of_pythons_counts_calls() -> None:
    def learn(model: Model, hidden: Tensor) -> None:
        model.calls += 1
        model.plain = model.plain * model.calls

    model = Model(learn)
    run = torch.compile(model, backend=fxsched.backend(ONE_BY_ONE["gpipe"]))
    for call in range(1, 4):
        before = model.plain.clone()
        run(torch.randn(8, 8))
        assert model.calls == call
        torch.testing.assert_close(model.plain, before * call)
