"""Mixtures of experts in shards, of which each has some experts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules
from fxsched.ir.shard_calls import (
    grouped_part,
    of_groups,
    of_picked,
    picked_part,
)

from ..cases import assert_equal, eager_step, train

Experts = Callable[["Mixture", Tensor, Tensor, Tensor], Tensor]


class Mixture(nn.Module):
    """Linear layers around experts, each a part of stacked weights. x [batch, 5, 8]."""

    def __init__(self, experts: Experts, count: int = 4) -> None:
        super().__init__()
        self.experts, self.count = experts, count
        self.router, self.one = nn.Linear(8, count), nn.Linear(8, 8)
        self.feeds = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))
        self.up = nn.Parameter(torch.randn(count, 8, 16) / 3)
        self.bias = nn.Parameter(torch.randn(count, 16) / 3)
        self.down = nn.Parameter(torch.randn(count, 16, 8) / 4)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        """The mean squared distance of x and what its experts add from what is wanted,
        both [batch, 5, 8]."""
        rows = x.flatten(0, 1)
        weights, numbers = self.router(rows).softmax(-1).topk(2)
        made = self.experts(self, rows, weights, numbers)
        return F.mse_loss(rows + made, wanted.flatten(0, 1))


def dense(m: Mixture, rows: Tensor, weights: Tensor, numbers: Tensor) -> Tensor:
    gates = torch.zeros(len(rows), m.count).scatter(1, numbers, weights)
    hidden = F.gelu(torch.einsum("nd,edh->enh", rows, m.up) + m.bias[:, None])
    return torch.einsum("enh,ehd,ne->nd", hidden, m.down, gates)


def picked(m: Mixture, rows: Tensor, weights: Tensor, numbers: Tensor) -> Tensor:
    own = numbers.flatten() - m.count  # counted from the end
    every = rows.repeat_interleave(2, 0).unsqueeze(1)
    hidden = F.gelu(torch.bmm(every, m.up[own]).squeeze(1) + m.bias[own])
    hidden = F.layer_norm(hidden, (16,))
    made = torch.bmm(hidden.unsqueeze(1), m.down[own]).squeeze(1)
    return (made * weights.reshape(-1, 1)).view(len(rows), 2, 8).sum(1)


def grouped(m: Mixture, rows: Tensor, weights: Tensor, numbers: Tensor) -> Tensor:
    """Of bfloat16."""
    own, order = numbers.flatten().sort()
    counts = torch.histc(own.float(), m.count, 0, m.count - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    hidden = F.gelu(F.grouped_mm(rows[order // 2], m.up, offs=ends) + m.bias[own])
    made = F.grouped_mm(hidden, m.down, offs=ends) * weights.flatten()[order, None]
    return torch.zeros_like(rows).index_add(0, order // 2, made)


def selected(m: Mixture, rows: Tensor, weights: Tensor, numbers: Tensor) -> Tensor:
    made = torch.zeros_like(rows)
    for e in range(m.count):
        row, place = torch.where(numbers == e)
        hidden = F.gelu(rows[row] @ m.up[e] + m.bias[e])
        own = hidden @ m.down[e] * weights[row, place, None]
        made.index_add_(0, row, own)
    return made


def modules(m: Mixture, rows: Tensor, weights: Tensor, numbers: Tensor) -> Tensor:
    made = rows / 2
    for e, expert in enumerate(m.feeds):
        row, place = torch.where(numbers == e)
        own = expert(rows[row]) * weights[row, place, None]
        made = made.index_add(0, row, own)
    return made


def one(m: Mixture, rows: Tensor, weights: Tensor, numbers: Tensor) -> Tensor:
    row, _ = torch.where(numbers == 0)
    return torch.zeros_like(rows).index_add(0, row, m.one(rows[row]))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 5, 8), torch.randn(8, 5, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "names"),
    [
        (picked, ["up", "down"]),
        (selected, ["up", "down"]),
        (modules, [f"feeds.{i}.weight" for i in range(4)]),
    ],
)
def test_experts_are_cut_by_expert(experts: Experts, names: list[str]) -> None:
    torch.manual_seed(0)
    model, inputs = Mixture(experts), batch()
    eager = copy.deepcopy(model)
    backend = fxsched.backend(schedules.sharded(schedules.gpipe(1, 2), 2))
    run = torch.compile(model, backend=backend)

    def step() -> Tensor:
        loss: Tensor = run(*inputs)
        loss.backward()
        return loss

    wanted = train(eager, lambda: eager_step(eager, inputs, 2), "adamw")
    assert_equal(train(model, step, "adamw"), wanted)
    assert backend.plan is not None
    words = {cut.name: cut.word for cut in backend.plan.cuts}
    assert [words[name] for name in names] == ["expert"] * len(names)
    assert words["router.weight"] == "whole"


@pytest.mark.slow
def test_dense_experts_are_cut_by_expert() -> None:
    schedule = schedules.sharded(schedules.gpipe(1, 2), 2)
    cuts = fxsched.plan(Mixture(dense), schedule, *batch()).cuts
    words = {cut.name: cut.word for cut in cuts}
    assert (words["up"], words["down"]) == ("expert", "expert")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "count", "name", "why"),
    [
        (one, 4, "one.weight", "rows are picked by value in mixture, by no"),
        (grouped, 3, "up", "its 3 experts don't divide by 2"),
    ],
)
def test_why_experts_stay_whole(
    experts: Experts, count: int, name: str, why: str
) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            self.mixture = Mixture(experts, count)
            self.to(torch.bfloat16)

        def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
            loss: Tensor = self.mixture(self.feed(x), wanted)
            return loss

    schedule = schedules.sharded(schedules.gpipe(1, 2), 2)
    inputs = (each.bfloat16() for each in batch())
    cuts = fxsched.plan(Both(), schedule, *inputs).cuts
    (found,) = [cut for cut in cuts if cut.name == f"mixture.{name}"]
    assert found.word == "whole"
    assert found.why.startswith(why)


@pytest.mark.parametrize(
    ("experts", "count", "words", "text"),
    [
        (
            picked,
            3,
            {"mixture": "expert"},
            r"up can't be cut into 2 .*: its 3 experts don't divide\n  at .*.py:",
        ),
        (
            picked,
            4,
            {"*router": "expert"},
            "names no weight of all experts, .* but mixture.rou",
        ),
        (
            one,
            4,
            {"mixture": "expert"},
            "one.weight can't be cut into 2 .*: rows are picked by value in mix",
        ),
    ],
)
def test_experts_by_name(
    experts: Experts, count: int, words: dict[str, str], text: str
) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixture = Mixture(experts, count)

        def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
            loss: Tensor = self.mixture(x, wanted)
            return loss

    schedule = schedules.sharded(schedules.gpipe(1, 2), 2)
    with pytest.raises(PlanError, match=text):
        fxsched.plan(Around(), schedule, *batch(), shards=words)


@pytest.mark.parametrize("ends", [[2, 2, 5, 7], [0, 0, 0, 7], [3, 7, 7, 7]])
def test_parts_of_a_grouped_product_add_up(ends: list[int]) -> None:
    def product(x: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
        made = torch.full((len(x), weights.shape[2]), torch.nan)  # as it is found
        start = 0
        for end, weight in zip(offs.tolist(), weights, strict=True):
            made[start:end] = x[start:end] @ weight
            start = end
        return made

    x, weights, at = torch.randn(7, 3), torch.randn(4, 3, 2), torch.tensor(ends)
    parts = [grouped_part(product, x, weights[i : i + 2], at, i) for i in (0, 2)]
    torch.testing.assert_close(sum(parts), product(x, weights, at))
    whole = parts[0] + parts[1]
    for i, part in zip((0, 2), parts, strict=True):
        torch.testing.assert_close(of_groups(whole, at, 0, i, 2, 4), part)


def test_parts_of_weights_that_numbers_pick_add_up() -> None:
    weights, numbers = torch.randn(4, 3), torch.tensor([3, 0, -1, 2, -4])
    whole = weights[numbers]
    for i in (0, 2):
        part = picked_part(weights[i : i + 2], numbers, i, 4)
        torch.testing.assert_close(of_picked(whole, numbers, 0, i, 2, 4), part)
        whole = whole - part
    assert not whole.any()
    with pytest.raises(IndexError):
        picked_part(weights[2:], torch.tensor([4]), 2, 4)


def test_what_comes_after_writes_in_place_is_cut() -> None:
    class Feed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
            return F.mse_loss(self.down(F.relu_(self.up(x))), wanted)

    plan = fxsched.plan(Feed(), schedules.sharded(schedules.gpipe(1, 2), 2), *batch())
    assert [cut.word for cut in plan.cuts] == ["column", "row"]
