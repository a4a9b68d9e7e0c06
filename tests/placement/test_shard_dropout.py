"""Dropout in shards draws the numbers that it draws without them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

import fxsched
from fxsched import Plan, Schedule, schedules
from fxsched.ir import ops
from fxsched.ir.shard_calls import attended, attention_weights
from fxsched.passes.open_attention import draws_on_cpu

from ..cases import microbatch
from ..shard_models import made, share, sums
from ..shard_sweep import CASES, Cell, check

ATTENTION = F.scaled_dot_product_attention


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "shards", "by"),
    [
        ("gpt with dropout", "zb_h1", 4, "name"),
        ("bert with dropout", "gpipe", 2, "auto"),
    ],
)
def test_dropout_in_shards_is_that_without(
    name: str, schedule: str, shards: int, by: str
) -> None:
    plan = check(Cell(name, schedule, shards, by))
    if schedule == "gpipe":
        forward, backward = sums(plan)
        assert forward == CASES[name].sums >= backward
    assert share(plan, made(name)[0], CASES[name].layers) <= 1 / shards + 0.05


@pytest.mark.slow
@pytest.mark.parametrize("weights", [False, True])
def test_multihead_attention_is_cut_by_heads(weights: bool) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.MultiheadAttention(16, 4, 0.3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.heads(x, x, x, need_weights=weights)[0]).square().mean()

    torch.manual_seed(0)
    model, x = Attends(), torch.randn(4, 3, 16)
    schedule = schedules.sharded(schedules.gpipe(1, 2), 4)
    found, plan = train(model, schedule, x)
    wanted, _ = train(model, schedules.gpipe(1, 2), x)
    torch.testing.assert_close(found, wanted)
    assert [cut.word for cut in plan.cuts] == ["column", "row"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scale", [0.3, -0.5])
@pytest.mark.parametrize("kind", [None, "bool", "float"])
@pytest.mark.parametrize("dims", [3, 4])
def test_attention_written_out_is_what_torch_computes(
    dtype: torch.dtype, autocast: bool, scale: float, kind: str | None, dims: int
) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *(2, 4)[4 - dims :], 5, 8).to(dtype)
    masks = {"bool": torch.ones(5, 5).tril().bool(), "float": torch.randn(5, 5)}
    mask = masks[kind] if kind else None
    if kind == "float":
        mask = mask.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        torch.manual_seed(1)
        wanted = ATTENTION(q, k, v, mask, 0.4, scale=scale)
        torch.manual_seed(1)
        dropped = F.dropout(attention_weights(q, k, mask, scale), 0.4)
        found = attended(dropped, v, wanted.dtype)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


class Heads(nn.Module):
    """Attention with dropout, of heads of queries that share keys and values."""

    def __init__(self, autocast: bool = False) -> None:
        super().__init__()
        self.autocast = autocast
        self.query, self.out = nn.Linear(16, 32), nn.Linear(32, 16)
        self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            q, k, v = (
                project(x).unflatten(-1, (-1, 8)).transpose(1, 2)
                for project in (self.query, self.key, self.value)
            )
            y = ATTENTION(q, k, v, dropout_p=0.3, is_causal=True, enable_gqa=True)
            out = self.out(y.transpose(1, 2).flatten(2))
        return F.dropout(x + out, 0.2).float().square().mean()


class Seeded(TorchFunctionMode):
    """Seeds what draws as the microbatch of a step does."""

    def __init__(self, base: int, number: int) -> None:
        super().__init__()
        self.base, self.number, self.drawn = base, number, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (F.dropout, ATTENTION):
            torch.manual_seed(ops.seed(self.base, self.drawn, self.number).own)
            self.drawn += 1
        return func(*args, **(kwargs or {}))


def train(model: nn.Module, schedule: Schedule, x: Tensor) -> tuple[list[Tensor], Plan]:
    """The loss of a step and its gradients, and the plan."""
    model.zero_grad()
    torch.manual_seed(3)
    backend = fxsched.backend(schedule)
    loss = torch.compile(model, backend=backend)(x)
    loss.backward()
    values = [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return values, backend.plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "autocast"),
    [
        (schedules.one_f_one_b(2, 2), False),
        (schedules.replicate(schedules.gpipe(1, 1), 2), False),
        (schedules.gpipe(1, 2), True),
    ],
)
def test_dropout_in_shards_is_that_of_eager_with_the_same_seeds(
    schedule: Schedule, autocast: bool
) -> None:
    torch.manual_seed(0)
    model, x = Heads(autocast), torch.randn(4, 6, 16)
    eager = copy.deepcopy(model)
    found, _ = train(model, schedules.sharded(schedule, 2), x)
    torch.manual_seed(3)
    base, total = ops.draw_base(), torch.zeros(())
    for b in range(2):
        with Seeded(base, b):
            loss = eager(*microbatch((x,), b, 2)) / 2
        loss.backward()
        total += loss.detach()
    near = 2e-2 if autocast else 1e-6
    wanted = [total, *(p.grad for p in eager.parameters())]
    torch.testing.assert_close(found, wanted, rtol=near, atol=near)


class Noisy(nn.Module):
    """What draws in between two layers that could be cut else."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(8, 16) for _ in range(8))
        self.down = nn.ModuleList(nn.Linear(16, 8) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        draw = [
            lambda h: F.dropout(input=h, p=0.4),
            lambda h: torch.dropout(h, 0.4, True),
            lambda h: F.dropout(h, 1.0),  # which draws nothing
            lambda h: F.rrelu(h - 0.5, training=True),
            lambda h: F.alpha_dropout(h, 0.4, training=True),
            lambda h: F.dropout1d(h.unsqueeze(-1), 0.4).squeeze(-1),
            lambda h: F.dropout(h * 1.0, 0.4, inplace=True),
            lambda h: h + torch.rand_like(h),
        ]
        for up, down, each in zip(self.up, self.down, draw, strict=True):
            x = x + down(each(up(x)))
        return F.dropout(x, 0.3).square().mean()


@pytest.mark.slow
def test_what_draws_otherwise_is_whole_and_said() -> None:
    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(4, 8)
    schedule = schedules.sharded(schedules.gpipe(1, 2), 2)
    found, plan = train(model, schedule, x)
    wanted, _ = train(model, schedules.gpipe(1, 2), x)
    torch.testing.assert_close(found, wanted)
    whole = {cut.name for cut in plan.cuts if cut.parts == 1}
    assert whole == {f"{u}.{i}.weight" for u in ("up", "down") for i in range(3, 8)}
    why = "random numbers are drawn for all of what it makes by feature_dropout in the"
    assert any(cut.why == f"{why} model" for cut in plan.cuts)


def test_attention_with_dropout_stays_whole_where_it_is_computed_otherwise() -> None:
    attention = torch.ops.aten.scaled_dot_product_attention.default
    node = fx.Graph().call_function(attention)
    node.meta.update(random=1, val=torch.empty(2, device="meta"))
    assert not draws_on_cpu(node)
    node.meta["val"] = torch.empty(2)
    assert draws_on_cpu(node)
