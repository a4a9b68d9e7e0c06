"""What F writes into the model: each microbatch sees the one before, as in eager."""

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


def eager(model: nn.Module, x: Tensor) -> list[Any]:
    """The outputs of microbatches, one after the other, with their gradients."""
    found = []
    for part in x.chunk(MICROBATCHES):
        found.append(model(part))
        made = found[-1]["loss"] if isinstance(found[-1], dict) else found[-1]
        (made / MICROBATCHES).backward()
    return found


def loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.mark.parametrize("learn", LEARNS)
def test_each_microbatch_sees_the_one_before(learn: Any) -> None:
    ways = list(ONE_BY_ONE.values())
    schedule = ways[LEARNS.index(learn) % len(ways)]
    model = Model(learn)
    reference = copy.deepcopy(model)
    run = torch.compile(model, backend=fxsched.backend(schedule))
    for _ in range(3):
        x = torch.randn(8, 8)
        found, wanted = run(x), eager(reference, x)
        loss_of(found).backward()
        mean = torch.stack([loss_of(each).detach() for each in wanted]).mean()
        torch.testing.assert_close(loss_of(found).detach(), mean)
        if isinstance(found, dict):  # what it is after the last
            torch.testing.assert_close(found["more"], wanted[-1]["more"])
        torch.testing.assert_close(model.state(), reference.state(), rtol=0, atol=0)
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
            mine.grad = other.grad = None


def test_a_buffer_written_in_place_stays_the_tensor_it_was() -> None:
    model = Model(returned)
    before, run = model.n, None
    run = torch.compile(model, backend=fxsched.backend(ONE_BY_ONE["gpipe"]))
    found = run(torch.randn(8, 8))
    assert model.n is before and found["more"] is before


def test_what_is_replaced_leaves_the_old_tensor_alone() -> None:
    model = Model(replaced)
    before, value = model.ema, model.ema.clone()
    run = torch.compile(model, backend=fxsched.backend(ONE_BY_ONE["gpipe"]))
    found = run(torch.randn(8, 8))
    assert found["more"] is model.ema and model.ema is not before
    assert torch.equal(before, value)
    assert dict(model.named_buffers())["ema"] is model.ema


def grown(model: Model, hidden: Tensor) -> None:
    model.n = model.n + hidden.detach().mean(0)


def attached(model: Model, hidden: Tensor) -> None:
    model.ema = 0.9 * model.ema + 0.1 * hidden.mean(0)


def scattered(model: Model, hidden: Tensor) -> None:
    model.ema.mul_(0.9).add_(0.1 * hidden.detach().mean(0))


@pytest.mark.parametrize(
    ("learn", "match"),
    [
        (grown, r"n gets a new value, at\n.*mean\(0\)\nwhich is float32\[8\]"),
        (attached, r"(?s)ema gets a new value.*assign new_value.detach\(\)"),
    ],
)
def test_state_that_cannot_go_from_one_microbatch_to_the_next(
    learn: Any, match: str
) -> None:
    run = torch.compile(Model(learn), backend=fxsched.backend(ONE_BY_ONE["gpipe"]))
    with pytest.raises(PlanError, match=match):
        run(torch.randn(8, 8))


@pytest.mark.parametrize("learn", [average, scattered])
def test_state_scattered_over_workers_is_an_error_with_both_remedies(
    learn: Any,
) -> None:
    run = torch.compile(Model(learn), backend=fxsched.backend(schedules.ddp(2, 4)))
    message = (
        r"writes into ema, at\n.*model.ema.*\nand workers 0, 1 run it: "
        r".*schedules.gpipe.* backend\(buffers=\{'ema': 'mean'\}\)"
    )
    with pytest.raises(PlanError, match=message):
        run(torch.randn(8, 8))


def workers_of(model: Model, x: Tensor) -> list[Model]:
    """What each of two workers has after every second microbatch."""
    copies = [copy.deepcopy(model) for _ in range(2)]
    with torch.no_grad():
        for i, part in enumerate(x.chunk(MICROBATCHES)):
            copies[i % 2](part)
    return copies


@pytest.mark.parametrize(
    ("learn", "how"), [(average, "mean"), (scattered, "sum"), (average, "last")]
)
def test_the_user_says_what_scattered_state_becomes(learn: Any, how: str) -> None:
    model, x = Model(learn), torch.randn(8, 8)
    copies = workers_of(model, x)
    backend = fxsched.backend(schedules.ddp(2, 4), buffers={"ema": how})
    torch.compile(model, backend=backend)(x)
    first, second = (each.ema for each in copies)
    wanted = {"mean": (first + second) / 2, "sum": first + second, "last": second}
    torch.testing.assert_close(model.ema, wanted[how])


def total(model: Model, hidden: Tensor) -> Tensor:
    model.n += hidden.detach().sum()
    model.steps = 2 + model.steps
    return model.n


def test_what_is_only_added_to_is_summed_over_workers() -> None:
    model = Model(total)
    reference = copy.deepcopy(model)
    run = torch.compile(model, backend=fxsched.backend(schedules.ddp(2, 4)))
    for _ in range(2):
        x = torch.randn(8, 8)
        found = run(x)
        eager(reference, x)
        torch.testing.assert_close(found["more"], reference.n)
        torch.testing.assert_close(model.state(), reference.state())


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


@pytest.mark.parametrize("turn", [False, True])
def test_integers_that_are_read_are_no_counters(turn: bool) -> None:
    run = torch.compile(Counters(turn), backend=fxsched.backend(schedules.ddp(2, 4)))
    with pytest.raises(PlanError, match="writes into place"):
        run(torch.randn(8, 8))


class Norms(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(3, 4, 1), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).pow(3).mean()


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm1d(4),
        lambda: nn.InstanceNorm1d(4, track_running_stats=True, affine=True),
    ],
)
def test_running_statistics_are_averaged_over_workers(norm: Any) -> None:
    model, x = Norms(norm()), torch.randn(8, 3, 5)
    copies = workers_of(model, x)
    torch.compile(model, backend=fxsched.backend(schedules.ddp(2, 4)))(x)
    first, second = (each.norm for each in copies)
    for name in ("running_mean", "running_var"):
        found = getattr(model.norm, name)
        mean = (getattr(first, name) + getattr(second, name)) / 2
        torch.testing.assert_close(found, mean)
    if isinstance(model.norm, nn.BatchNorm1d):
        assert model.norm.num_batches_tracked == 4


@pytest.mark.parametrize("old", [False, True])
def test_spectral_norm_goes_on_with_each_microbatch(old: bool) -> None:
    way = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(way(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8))
    reference = copy.deepcopy(model)
    schedule = replace(schedules.gpipe(2, MICROBATCHES), stages=2)
    step = torch.compile(Squared(model), backend=fxsched.backend(schedule))
    for _ in range(2):
        x = torch.randn(8, 8)
        loss = step(x)
        loss.backward()
        wanted = eager(Squared(reference), x)
        torch.testing.assert_close(loss, sum(wanted) / MICROBATCHES)
    pairs = zip(model.buffers(), reference.buffers(), strict=True)
    for found, other in pairs:
        torch.testing.assert_close(found, other)
    for found, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.grad, other.grad)


class Squared(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).pow(2).mean()


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
        torch.testing.assert_close(model.plain, before * call**MICROBATCHES)
