"""What a model writes in place, given as values: outputs, gradients and state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxsched
from fxsched import PlanError, schedules


def rows_and_columns(m: Any, h: Tensor) -> Tensor:
    before = h[:, 0]
    h[:, 1:3] *= 2
    h[:, 0] = h[:, 3].exp()
    return h.sum() + before.pow(2).sum()


def of_views(m: Any, h: Tensor) -> Tensor:
    flat, turned = h.view(-1), h.t()
    flat.mul_(3)
    turned[1].add_(1)
    first, second = h.chunk(2, 1)
    out = torch.zeros_like(h)
    out[:, :2] = first
    out[:, 2:].copy_(second)
    return (out * flat.view_as(h)).sum()


def without_gradients(m: Any, h: Tensor) -> Tensor:
    row = h[:, 0]
    with torch.no_grad():
        h.mul_(2)
        h[:, 1].clamp_(max=0.5)
    return (h * 3).pow(2).sum() + row.sum()


def by_data(m: Any, h: Tensor) -> Tensor:
    h.data.clamp_(-0.1, 0.1)
    return h.pow(2).sum()


def several_at_once(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_mul_([m.a, m.b], 0.5)
        torch._foreach_add_([m.a, m.b], [h.mean(0), h.mean(0)])
    return (h * m.a).sum() + m.b.sum()


@torch.library.custom_op("fxsched_tests::moved", mutates_args=("state",))
def moved(state: Tensor, by: Tensor) -> Tensor:
    state.add_(by)
    return state * 2


@moved.register_fake
def _(state: Tensor, by: Tensor) -> Tensor:
    return torch.empty_like(state)


def by_an_operator_of_the_users(m: Any, h: Tensor) -> Tensor:
    twice = moved(m.a, h.detach().mean(0))
    return (h * m.a).sum() + (h * twice).sum()


def of_integers(m: Any, h: Tensor) -> Tensor:
    m.seen.add_((h > 0).sum(0))
    return (h * m.seen).sum()


def masked(m: Any, h: Tensor) -> Tensor:
    h[h < 0] = 0
    h.masked_fill_(h > 1, 1.0)
    return h.scatter_(1, torch.zeros(len(h), 1, dtype=torch.long), 2.0).pow(2).sum()


def unused(m: Any, h: Tensor) -> Tensor:
    m.a.copy_(h.detach().mean(0))
    m.a.copy_(h.detach().sum(0))
    return h.sum()


def first_rows(m: Any, h: Tensor) -> Tensor:
    h[:2] = 0  # as many as a microbatch has
    h.narrow(0, 1, 2).mul_(2)
    h[-1] = 1
    return h.pow(2).mean()


def chosen_rows(m: Any, h: Tensor) -> Tensor:
    numbers = torch.arange(len(h))
    h[numbers, numbers % 4] = 0
    out = torch.zeros(len(h) + 1, 4)
    out[1:] = h
    out[: len(h) - 1] += 1
    more = torch.zeros(8, 4)
    more[: len(h)] = 1
    return (out[:-1] * h).sum() + (more * h.mean(0)).sum()


def sizes(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.a[:2] += len(h)
        m.b.fill_(len(h))
        m.b.div_(2 * len(h))
    return (h * m.a * m.b).mean() + (h * torch.full((4,), len(h))).mean()


def sums(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.a.copy_(h.sum(0))
        m.a.mul_(1 / len(h))
    return (h * m.a).sum()


def beside_rows_that_meet(m: Any, h: Tensor) -> Tensor:
    h.register_hook(lambda g: g * len(g) / 6)
    weights = m.first.weight.clone()
    weights[0] = weights.mean(0)
    return h.pow(2).mean() + (weights * 2).tanh().sum()


def one_of_several_results(m: Any, h: Tensor) -> Tensor:
    values, places = h.topk(3, 1)
    values /= values.detach().abs().sum(1, keepdim=True)
    values[:, 0] += 1
    return (values * places).pow(2).sum()


class Model(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.use = nn.Linear(4, 4), use
        self.register_buffer("a", torch.ones(4))
        self.register_buffer("b", torch.zeros(4))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.first(x))


USES = (
    *(rows_and_columns, of_views, without_gradients, by_data),
    *(several_at_once, by_an_operator_of_the_users, of_integers, masked, unused),
    *(first_rows, chosen_rows, sizes, sums, beside_rows_that_meet),
    one_of_several_results,
)


@pytest.mark.parametrize("use", USES)
def test_writes_are_eagers(use: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model(use).double()  # values that are near 0 differ by more in float32
    eager = copy.deepcopy(model)
    step = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 3)))
    for _ in range(2):
        x = torch.randn(6, 4, dtype=torch.float64)
        found, wanted = step(x), eager(x)
        torch.testing.assert_close(found, wanted)
        found.backward()
        wanted.backward()
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


class Recomputed(Model):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_state_written_in_a_checkpoint_is_refused() -> None:
    torch._dynamo.reset()
    model = Recomputed(unused)
    step = torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 3)))
    with pytest.raises(PlanError, match=r"inside torch.utils.checkpoint at\n.*copy_"):
        step(torch.randn(6, 4))
