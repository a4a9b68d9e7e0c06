"""Backwards that users write: rows that meet in them meet on the whole batch."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

import fxsched
from fxsched import schedules
from fxsched.placement.own_backward import own_name

from .test_rows import rows_of

# mypy: disable-error-code="no-any-return, override, no-untyped-call"


class Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (g.norm() + 1e-12)


class Mean(Function):
    """A layer whose weights' gradient is divided by the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x / len(x)


class Linear(Function):
    """As torch.nn.functional.linear; sizes that it reads cancel out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x / len(x), w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x * len(x)


class Entropy(Function):
    """A loss that makes its gradient in F, of means over the batch."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        p = z.softmax(-1)
        ctx.save_for_backward((p - F.one_hot(y, z.shape[-1])) / len(z))
        return -p.log().gather(1, y[:, None]).mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.saved_tensors[0], None


class Clamped(Function):
    """Of weights: not linear in the sum over microbatches."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-1e-3, 1e-3)


class Filled(Function):
    """Divided by the batch's size where that is no operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = len(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * torch.full(g.shape, 1 / ctx.size)


class Exp(Function):
    """Keeps what it returns, twice, for a backward of other gradients than exp's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x * 0.5).exp()
        ctx.save_for_backward(y, y, x)
        return y, y + 1

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
        y, again, x = ctx.saved_tensors
        return g * y + 3 * h * again + x * g


class Two(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        mask = x > 0
        ctx.mark_non_differentiable(mask)
        return x * y, x.flip(0), mask

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor, h: Tensor, _: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return g * y + h.flip(0), g * x if ctx.needs_input_grad[1] else None


class Model(nn.Module):
    def __init__(self, hidden: Any = None, loss: Any = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.hidden, self.loss = hidden, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        h = self.hidden(self, h) if self.hidden else h
        z = self.b(torch.tanh(h))
        return self.loss(z, y.argmax(1)) if self.loss else (z - y).pow(2).mean()


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8, scale_grad_by_freq=True)
        self.b = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.table((x[:, 0] * 2).long().abs().clamp(max=5))
        return (self.b(rows) - y).pow(2).mean()


def hooked(hook: Callable[[Tensor], Tensor], late: bool = False) -> Any:
    def hidden(model: Model, h: Tensor) -> Tensor:
        half = h * 0.5 if late else 0
        h.register_hook(hook)
        return h + half

    return hidden


def two(model: Model, h: Tensor) -> Tensor:
    a, b, mask = Two.apply(h, h.cos())
    return a + b * mask


MEET = {
    "norm": lambda: Model(lambda m, h: Norm.apply(h)),
    "mean": lambda: Model(lambda m, h: Mean.apply(h, m.b.weight)),
    "filled": lambda: Model(lambda m, h: Filled.apply(h)),
    "two": lambda: Model(two),
    "weights": lambda: Model(lambda m, h: F.linear(h, Clamped.apply(m.b.weight))),
    "hook: norm": lambda: Model(hooked(lambda g: g / g.norm())),
    "hook: late": lambda: Model(hooked(lambda g: g / g.norm(), late=True)),
    "hook: size": lambda: Model(hooked(lambda g: g * len(g))),
    "frequency": Counted,
}
APART = {
    "linear": lambda: Model(lambda m, h: Linear.apply(h, m.b.weight)),
    "loss": lambda: Model(loss=lambda z, y: Entropy.apply(z, y)),
    "saved": lambda: Model(lambda m, h: torch.sub(*Exp.apply(h)) * m.b.bias),
    "hook: clamp": lambda: Model(hooked(lambda g: g.clamp(-1e-3, 1e-3), late=True)),
    "hook: row": lambda: Model(hooked(lambda g: g / g.norm(dim=1, keepdim=True))),
}
MEET["hook: both"] = lambda: Model(
    lambda m, h: (z := hooked(lambda g: g / 2)(m, h)) + z.flip(0).cos()
)
MEET["hook: written"] = lambda: Model(
    lambda m, h: hooked(lambda g: g / g.norm(), late=True)(m, h.mul_(2))
)
APART["all"] = lambda: Model(
    lambda m, h: hooked(lambda g: g.clamp(-1e-3, 1e-3), True)(
        m, Linear.apply(h, m.b.weight)
    ),
    Entropy.apply,
)
CASES = [("norm", "1f1b"), ("weights", "ddp"), ("hook: late", "fsdp")]
CASES += [
    ("saved", "ddp"),
    ("all", "interleaved"),
    ("hook: both", "1f1b"),
    ("hook: written", "1f1b"),
]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 8), torch.randn(8, 8)


@pytest.mark.parametrize("name", sorted({*MEET, *APART} - {"weights", "all"}))
def test_rows_meet_where_gradients_are_not_of_rows(name: str) -> None:
    (loss,) = rows_of({**MEET, **APART}[name](), *batch())
    assert loss is not None
    assert (loss.cause is not None) is (name in MEET)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_gradients_are_eagers(name: str, kind: str) -> None:
    torch.manual_seed(0)
    model = {**MEET, **APART}[name]()
    eager, (x, y) = copy.deepcopy(model), batch()
    backend = fxsched.backend(schedules.LIBRARY[kind](2, 4))
    step = torch.compile(model, backend=backend)
    steps = [
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, eager)
    ]
    with backend:
        for _ in range(3):
            losses = [run(x, y) for run in (step, eager)]
            for loss, optimizer in zip(losses, steps, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(*losses)
        for found, wanted in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_the_plan_says_where_gradients_meet() -> None:
    text = fxsched.explain(MEET["mean"](), schedules.gpipe(2, 4), *batch())
    where = r"rows of the batch meet in .+, at\s\S*test_own_backward.py:\d+:\s+grad"
    assert re.search(where, text)


@pytest.mark.slow
def test_a_scaled_loss_is_an_error_unless_b_starts_from_it() -> None:
    torch.manual_seed(0)
    model = APART["hook: clamp"]()
    eager, (x, y) = copy.deepcopy(model), batch()
    (eager(x, y) / 4).backward()
    schedule = schedules.gpipe(2, 4)
    step = torch.compile(model, backend=fxsched.backend(schedule))
    with pytest.raises(
        RuntimeError, match=r"doesn't give gradients in proportion.*loss_scale=0.25"
    ):
        (step(x, y) / 4).backward()
    torch._dynamo.reset()
    step = torch.compile(model, backend=fxsched.backend(schedule, loss_scale=0.25))
    (step(x, y) / 4).backward()
    for found, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


def test_a_hook_after_a_write_is_on_what_was_written() -> None:
    def hidden(model: Model, h: Tensor) -> Tensor:
        h[:, 0].mul_(2)
        h.register_hook(lambda g: g * 3)
        return h

    torch.manual_seed(0)
    model = Model(hidden)
    eager, (x, y) = copy.deepcopy(model), batch()
    step = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 4)))
    step(x, y).backward()
    eager(x, y).backward()
    for found, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


class Queued(nn.Module):
    """Has a hook on what only state reads, beside a queue of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("queue", torch.randn(16, 6))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        twice = h * 2
        twice.register_hook(lambda g: g / (g.norm() + 1))
        with torch.no_grad():
            self.seen.lerp_(twice.mean(0), 0.1)
        y = h - (h @ self.queue.clone().T).softmax(-1) @ self.queue.clone()
        at = (self.at + torch.arange(len(y))) % 16
        self.queue.index_copy_(0, at, y.detach())
        self.at.add_(len(y))
        return self.last(y).square().mean()


@pytest.mark.slow
def test_a_hook_on_what_gets_no_gradient_never_runs() -> None:
    torch.manual_seed(0)
    model = Queued()
    eager, x = copy.deepcopy(model), torch.randn(8, 6)
    step = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 2)))
    for run in (step, eager):
        run(x).backward()
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    for found, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


def test_this_torch_has_a_form_of_backwards_that_is_followed() -> None:
    """It changed from 2.11 to 2.13; one that isn't known would count as if rows met."""
    found: list[str | None] = []

    def look(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(filter(None, map(own_name, gm.graph.nodes)))
        return gm

    for name in ("linear", "hook: row"):
        torch._dynamo.reset()
        torch.compile(APART[name](), backend=look)(*batch())
    assert found in (
        ["autograd_function_apply", "register_hook"],  # torch 2.13
        ["autograd_function_apply", "autograd_function_apply"],  # 2.12
        ["autograd_function_apply"],  # 2.11, where hooks break the graph
    )
