"""What is drawn without the batch's size is drawn once a step, what is drawn among its
rows once for the whole batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fxsched
from fxsched import PlanError, Schedule, schedules
from fxsched.ir import ops
from tests.devices import find_devices
from tests.drawn_models import Drawing, Once, Rows, compare
from tests.started_ranks import run_ranks
from tests.whole_batch import drawn

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "1f1b": lambda: schedules.one_f_one_b(2, 4),
    "ddp": lambda: schedules.ddp(2, 4),
    "fsdp": lambda: schedules.fsdp(2, 4),
    "interleaved": lambda: schedules.interleaved(2, 4, 2),
    "random": lambda: drawn(2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", [Once, Rows])
def test_draws_of_the_whole_batch_are_made_once(kind: type[Drawing], name: str) -> None:
    torch._dynamo.reset()
    model = kind()
    torch.manual_seed(5)
    step = torch.compile(model, backend=fxsched.backend(SCHEDULES[name]()))
    numbers = compare(model, step, lambda trained: trained.state_dict())
    assert not torch.equal(numbers[0][0], numbers[1][0])  # each step draws anew


@pytest.mark.slow
def test_two_ranks_draw_the_same_whatever_their_generators_do() -> None:
    done = run_ranks(2, "tests.ranks_draws")
    assert done.stdout.count("draws hold") == 2, done.stdout


class Weights(Drawing):
    """DropConnect, once in a checkpoint."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def branch(x: Tensor) -> Tensor:
            return F.linear(x * torch.rand(1), F.dropout(self.first.weight))

        hidden = checkpoint(branch, x, use_reentrant=False)
        return F.linear(hidden, F.dropout(self.last.weight)).square().mean(), hidden


@pytest.mark.parametrize(
    "options", [{"carry": "recompute"}, {"stage_compiler": "inductor"}], ids=str
)
def test_recomputed_and_compiled_stages_draw_the_same(options: dict[str, str]) -> None:
    results = []
    for given in ({}, options):
        torch._dynamo.reset()
        model, x = Weights(), torch.linspace(-1, 1, 64).view(8, 8)
        backend = fxsched.backend(schedules.gpipe(2, 4), **given)
        torch.manual_seed(5)
        loss, hidden = torch.compile(model, backend=backend)(x)
        loss.backward()
        results.append([loss.detach(), hidden, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results)
    weight = results[0][2]
    assert 0.2 < (weight == 0).float().mean() < 0.8  # one mask, of all microbatches


def test_masks_of_weights_in_a_checkpoint_pass_verify() -> None:
    torch._dynamo.reset()
    found = fxsched.verify(
        Weights(), schedules.gpipe(2, 4), torch.ones(8, 8), loss=lambda out: out[0]
    )
    assert found.passed, found.why


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return torch.rand(1)


GENERATOR = torch.Generator()


def own_generator(x: Tensor) -> Tensor:
    return torch.rand(1, generator=GENERATOR)


def of_python(x: Tensor) -> Tensor:
    return x * random.random()


def branched(x: Tensor) -> Tensor:
    return x if torch.rand(1) < 0.5 else -x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (seeded, "calls torch.manual_seed, which would happen once"),
        (own_generator, r"draws from a torch.Generator at\n"),
        (of_python, "draws numbers with random, which tracing would make constants"),
        (branched, "torch.rand.1. < 0.5"),
    ],
)
def test_draws_that_a_trace_would_change_are_refused(
    draw: Callable[[Tensor], Tensor], message: str
) -> None:
    class Model(Drawing):
        def forward(self, x: Tensor) -> Tensor:
            return (self.last(torch.tanh(self.first(x))) * draw(x)).square().mean()

    torch._dynamo.reset()
    step = torch.compile(Model(), backend=fxsched.backend(schedules.gpipe(2, 4)))
    with pytest.raises(PlanError, match=message):
        step(torch.ones(8, 8))


@pytest.mark.slow
def test_dropout_between_layers_of_an_rnn_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(8, 8, 2, dropout=0.3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.gru(x)[0].square().mean()

    torch._dynamo.reset()
    model, x = Model(), torch.ones(8, 3, 8)
    step = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 4)))
    with pytest.raises(PlanError, match="gru has dropout between its layers"):
        step(x)
    model.eval()
    torch.testing.assert_close(step(x), model(x))


@pytest.mark.parametrize("named", ["device=", "tensor", "list"])
def test_a_draw_seeds_the_devices_that_it_names_and_no_others(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On three devices that the CPU stands in for; the draw is on number 1."""
    devices, on_cpu = find_devices(monkeypatch, "cuda", 3), torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: on_cpu())
    before = [*devices.states(), torch.get_rng_state()]

    def draw(*args: Any, **kwargs: Any) -> list[Tensor]:
        cpu = torch.rand(3)
        return [cpu, *(torch.rand(3, generator=g) for g in devices.generators)]

    with FakeTensorMode():
        operand = torch.empty(2, device="cuda:1")
    arguments = {"tensor": (operand,), "list": ([operand], 3)}.get(named, ())
    keywords = {"device": operand.device} if named == "device=" else {}
    drawn = [ops.seeded(draw, 7, *arguments, **keywords) for _ in range(2)]
    assert torch.equal(drawn[0][0], drawn[1][0])
    same = [torch.equal(a, b) for a, b in zip(drawn[0][1:], drawn[1][1:], strict=True)]
    assert same == [False, True, False]
    assert torch.equal(drawn[0][2], drawn[0][0])  # both from seed 7
    after = [*devices.states(), torch.get_rng_state()]
    unchanged = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert unchanged == [False, True, False, True]  # others went on, as they drew
