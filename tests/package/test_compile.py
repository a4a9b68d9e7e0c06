"""Models that break Dynamo's graph train as in eager PyTorch, by torch.export's."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import fxsched
from fxsched import PlanError, schedules

from ..started_ranks import run_ranks

ONE = schedules.one_f_one_b(2, 2)
CUT = ["rows", "head"]


class Breaks(nn.Module):
    """All that a graph may hold, behind a line that breaks Dynamo."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.table = torch.ones(3)
        self.scale = 1.0

    def forward(self, x: Tensor, y: Tensor, *, shift: float = 0.0) -> dict[str, Any]:
        torch._dynamo.graph_break()
        with torch.no_grad():
            self.seen.add_(1)
            mean = x.mean(1, keepdim=True) * torch.tensor([0.5])
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            hidden = self.rows(x - mean).relu()[:, -1]
        logits = self.head(hidden) * self.scale * self.table + shift
        return {"loss": F.cross_entropy(logits, y), "logits": [logits], "n": 3}


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 5, 8, generator=generator)
    return x, torch.arange(rows) % 3


def assert_trains(
    step: Any, model: nn.Module, eager: nn.Module, *sizes: int, **kwargs: Any
) -> None:
    """Steps of these batch sizes are eager's."""
    mine = torch.optim.AdamW(model.parameters())
    other = torch.optim.AdamW(eager.parameters())
    for rows in sizes or (4,):
        found, wanted = step(*batch(rows), **kwargs), eager(*batch(rows), **kwargs)
        torch.testing.assert_close(found["logits"], wanted["logits"])
        assert found["n"] == 3
        found["loss"].backward()
        wanted["loss"].backward()
        for optimizer in (mine, other):
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, eager.get_parameter(name))


def pair(kind: type[nn.Module] = Breaks) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = kind()
    return model, copy.deepcopy(model)


@pytest.mark.slow
def test_a_model_that_breaks_trains_as_in_eager_and_says_why(capfd: Any) -> None:
    model, eager = pair()
    with fxsched.compile(model, ONE, stages=CUT) as step:
        assert_trains(step, model, eager, 4, 8)
        assert [s["modules"] for s in step.plan.stages.nodes.values()]
        line = "torch.export: Dynamo's graph breaks at test_compile.py:"
        assert step.captured_by.startswith(line)
        assert capfd.readouterr().err.count(line) == 1
        assert model.seen.item() == eager.seen.item() == 2


@pytest.mark.slow
def test_torch_compile_goes_by_export_too_and_says_why(capfd: Any) -> None:
    model, eager = pair()
    with fxsched.backend(ONE, stages=CUT) as backend:
        step = torch.compile(model, backend=backend)
        assert_trains(step, model, eager, 4, 8)
        assert backend.plan is not None
        error = capfd.readouterr().err
        assert error.count("captured by torch.export: Dynamo's graph breaks at") == 1


@pytest.mark.slow
def test_what_Dynamo_takes_for_a_fixed_batch_goes_by_export(capfd: Any) -> None:
    model, eager = Lists(8, 8), Lists(8, 8)
    eager.load_state_dict(model.state_dict())
    step = torch.compile(model, backend=fxsched.backend(ONE))
    for rows in (4, 8):
        x = torch.randn(rows, 3, 8)
        torch.testing.assert_close(step(x), eager(x))
    assert "it fixes the batch size" in capfd.readouterr().err


@pytest.mark.parametrize("breaks", [True, False])
def test_what_is_no_module_is_an_error_that_names_compile(breaks: bool) -> None:
    model = Lists(8, 8)
    model.breaks = breaks
    call = torch.compile(lambda x: model(x), backend=fxsched.backend(ONE))
    message = r"(?s)(breaks at|size is fixed).*; fxsched.compile\(model, schedule\)"
    with pytest.raises(PlanError, match=message):
        call(torch.ones(4, 3, 8))


@pytest.mark.slow
def test_a_model_that_breaks_is_verified(capfd: Any) -> None:
    model = Lists(8, 8)
    model.breaks = True
    assert fxsched.verify(model, ONE, torch.randn(4, 3, 8)).passed
    assert "captured by torch.export" in capfd.readouterr().err
    assert fxsched.verify(Statistics(8, 8), ONE, torch.randn(4, 8)).passed
    parted = {"batch_norm": "microbatch"}
    found = fxsched.verify(Statistics(8, 8), ONE, torch.randn(4, 8), **parted)
    assert not found.passed
    assert "batch_norm" in found.why, found.why


@pytest.mark.slow
def test_what_tracing_read_is_a_new_plan_once_it_changes(capfd: Any) -> None:
    model, eager = pair()
    step = fxsched.compile(model, ONE)
    assert_trains(step, model, eager)
    for each in (model, eager):
        each.scale = 2.0
        each.unread = "anything"
    assert_trains(step, model, eager)
    assert "self.scale was 1.0 and is 2.0" in capfd.readouterr().err
    assert_trains(step, model, eager, shift=1.0)
    for each in (model, eager):
        each.table = torch.tensor([1.0, 2.0, 3.0])
        each.head.weight.requires_grad_(False)
    assert_trains(step, model, eager)
    model.eval()
    with torch.no_grad():
        found, wanted = step(*batch(8)), eager.eval()(*batch(8))
    torch.testing.assert_close(found["loss"], wanted["loss"])
    assert not found["loss"].requires_grad
    assert capfd.readouterr().err.count("traced again, self.table") == 1


def outside(factor: float) -> tuple[Any, Any]:
    """A function of a closure's number, and one that sets it."""

    def scaled(x: Tensor) -> Tensor:
        return x * factor * NUMBERS["scale"] * Numbers.scale

    def to(value: float) -> None:
        nonlocal factor
        factor = value

    return scaled, to


class Numbers:
    scale = 1.0


NUMBERS = {"scale": 1.0}
number = 1.0
scaled, rescale = outside(1.0)
shared = nn.Linear(4, 4)


class ReadsOutside(nn.Linear):
    """Reads weights and numbers that aren't in it."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.tables = [nn.Parameter(torch.ones(4))]

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        rows = shared(super().forward(x)) * self.tables[0]
        return (scaled(rows) * number).pow(2).mean()


@pytest.mark.slow
def test_what_a_model_reads_outside_of_it_is_a_new_plan_once_it_changes(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    model, x = ReadsOutside(), torch.randn(4, 4)
    step = fxsched.compile(model, ONE)
    torch.testing.assert_close(step(x), model(x))
    monkeypatch.setitem(globals(), "number", 2.0)
    torch.testing.assert_close(step(x), model(x))
    monkeypatch.setitem(NUMBERS, "scale", 3.0)
    torch.testing.assert_close(step(x), model(x))
    monkeypatch.setattr(Numbers, "scale", 5.0)
    torch.testing.assert_close(step(x), model(x))
    rescale(7.0)
    torch.testing.assert_close(step(x), model(x))
    monkeypatch.setitem(globals(), "shared", nn.Linear(4, 4))
    torch.testing.assert_close(step(x), model(x))
    rescale(1.0)
    assert "test_compile.number was 1.0 and is 2.0" in capfd.readouterr().err


@pytest.mark.slow
def test_weights_that_a_model_does_not_register_are_trained() -> None:
    model, x = ReadsOutside(), torch.randn(4, 4)
    weights = [*model.parameters(), *shared.parameters(), *model.tables]
    step = fxsched.compile(model, ONE)
    step(x).backward()
    found = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    model(x).backward()
    torch.testing.assert_close(found, [weight.grad for weight in weights])


def test_a_model_that_Dynamo_traces_is_captured_by_it() -> None:
    step = fxsched.compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), ONE)
    step(torch.ones(4, 8)).sum().backward()
    assert step.captured_by == "Dynamo"


class Chooses(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x * 2
        return super().forward(x)


class Counts(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        self.calls += 1
        return super().forward(x)


class Remembers(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        self.last = super().forward(x)
        return self.last


class Compares(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        picked = x[x.sum(1) > 0]
        return super().forward(x) * 2 if len(picked) > 7 else super().forward(x)


class Draws(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x) * random.random()


class CountsGlobally(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        global calls
        torch._dynamo.graph_break()
        calls += 1
        return super().forward(x)


calls = 0


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Reverses(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        with torch.no_grad():
            Reversed.apply(x)
        return Reversed.apply(super().forward(x))  # type: ignore[no-any-return]


class Hooks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        rows = super().forward(x)
        rows.register_hook(lambda gradient: gradient * 2)
        return rows


class Hooked(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_full_backward_hook(lambda *gradients: None)


class Saves(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        with saved_tensors_hooks(lambda saved: saved / 2, lambda kept: kept * 2):
            return super().forward(x)


class Refusal(NamedTuple):
    model: type[nn.Linear]
    message: str


REFUSALS = [
    Refusal(Chooses, r"stops at\n.*test_compile.py.*\n +if x.sum\(\) > 0.*\n.*where"),
    Refusal(
        Compares, r"a size that test_compile.py:\d+, picked = x\[.* makes of the v"
    ),
    Refusal(Counts, r"forward writes to self.calls.*register_buffer"),
    Refusal(CountsGlobally, r"forward writes to [\w.]*test_compile.calls,.*register"),
    Refusal(Remembers, r"forward writes to self.last.*register_buffer"),
    Refusal(Reverses, r"gradient of its own .*\n.*\n +return Reversed.apply.*detach"),
    Refusal(Hooks, r"a hook on a gradient.*\n.*\n +rows.register_hook"),
    Refusal(Hooked, r"a backward hook of a module"),
    Refusal(Saves, r"hooks on saved tensors.*\n.*\n +with saved_tensors_hooks"),
    Refusal(Draws, r"draws numbers with random, .*torch.rand"),
]


@pytest.mark.slow
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda each: each.model.__name__)
def test_what_neither_can_trace_is_an_error_with_what_to_do(
    refusal: Refusal, capfd: Any
) -> None:
    model = refusal.model(8, 8)
    before, state = dict(vars(model)), random.getstate()
    with pytest.raises(PlanError, match=f"(?s){refusal.message}.*Dynamo breaks"):
        fxsched.compile(model, ONE)(torch.ones(4, 8))
    after = dict(vars(model))
    after.pop("_is_torch_compile", None)  # torch.compile's
    assert after == before
    assert calls == 0
    assert random.getstate() == state
    assert "def forward" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_batch_taken_apart_and_put_together_stays_one() -> None:
    torch.manual_seed(0)
    model, eager = Lists(8, 8), Lists(8, 8)
    eager.load_state_dict(model.state_dict())
    step = fxsched.compile(model, schedules.one_f_one_b(2, 2))
    for rows in (4, 8):
        x = torch.randn(rows, 3, 8)
        found, wanted = step(x), eager(x)
        torch.testing.assert_close(found, wanted)
        found.backward()
        wanted.backward()
    torch.testing.assert_close(model.weight.grad, eager.weight.grad)
    with pytest.raises(PlanError, match="goes through the batch row by row"):
        fxsched.compile(Rows(8, 8), ONE)(torch.ones(4, 8))


class Pair:
    """An object without a __dict__."""

    __slots__ = ("first", "second")

    def __init__(self, pair: tuple[Tensor, Tensor]) -> None:
        self.first, self.second = pair


class OfPairs(nn.Linear):
    def forward(self, pair: Any) -> Tensor:
        torch._dynamo.graph_break()
        x, y = (pair.first, pair.second) if isinstance(pair, Pair) else pair
        return super().forward(x) + y


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Pair, deque])
def test_a_batch_is_found_in_any_object(kind: Any) -> None:
    model = OfPairs(8, 8)
    step = fxsched.compile(model, ONE)
    for rows in (4, 8):
        pair = kind((torch.randn(rows, 8), torch.randn(rows, 8)))
        torch.testing.assert_close(step(pair), model(pair))


class Lists(nn.Linear):
    breaks = False

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        rows = list(super().forward(x))
        return super().forward(torch.cat(rows)).pow(2).mean()


class Statistics(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        rows = super().forward(x)
        return F.batch_norm(rows, None, None, training=True).pow(3).mean()


class Rows(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return torch.stack([row * 2 for row in super().forward(x)])


@pytest.mark.slow
def test_a_model_trains_over_ranks() -> None:
    done = run_ranks(2, "tests.broken_models", "gpt2", "--only", "1f1b")
    assert "gpt2" in done.stdout and " equal " in done.stdout
    assert "traced again" not in done.stderr + done.stdout


@pytest.mark.slow
def test_a_model_that_breaks_is_planned_without_running_it() -> None:
    plan = fxsched.plan(Breaks(), ONE, *batch(4), stages=CUT)
    assert [stage["modules"] for stage in plan.stages.nodes.values()]
    plan.check()
