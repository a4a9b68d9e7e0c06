"""Estimated costs: of one operation, of a node's F and B, and of whole stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxsched
from fxsched import schedules
from fxsched.partition.costs import RATES, Cost, Meter, cost_of
from tests.cases import build
from tests.partition.test_partition import capture

aten = torch.ops.aten


def test_a_view_costs_nothing() -> None:
    x = torch.ones(8, 4)
    for view in (aten.t.default, aten.detach.default):
        assert cost_of(view, (x,), {}, view(x)) == Cost()


def test_an_addition_moves_what_it_reads_and_writes() -> None:
    x = torch.ones(1 << 20)
    flops, moved, seconds = cost_of(aten.add.Tensor, (x, x), {}, x)
    rates = RATES["cpu"]
    assert (flops, moved) == (0, 3 * x.nbytes)
    assert seconds == pytest.approx(moved / rates.memory + rates.launch)


def test_an_embedding_reads_the_rows_that_it_gives() -> None:
    table, ids = torch.ones(10_000, 8), torch.zeros(4, dtype=torch.int64)
    out = aten.embedding.default(table, ids)
    assert cost_of(aten.embedding.default, (table, ids), {}, out).bytes == 2 * 4 * 8 * 4


def test_attention_on_a_cpu_has_flops_both_ways() -> None:
    q = torch.ones(2, 4, 16, 8, requires_grad=True)
    with Meter() as forward:
        out = nn.functional.scaled_dot_product_attention(q, q, q)
    with Meter() as backward:
        out.sum().backward()
    assert forward.total.flops == 2 * 2 * 2 * 4 * 16 * 16 * 8
    assert backward.total.flops >= 2 * forward.total.flops


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "unet", "encoder_decoder"])
def test_nodes_cost_together_what_the_real_stage_graphs_do(name: str) -> None:
    model, inputs = build(name)
    problem, _ = capture(model, 4, *inputs)
    whole = fxsched.plan(model, schedules.gpipe(1, 4), *inputs).stages.nodes[0]
    for what in ("forward", "backward", "held"):
        estimate = sum(getattr(unit, what) for unit in problem.units)
        assert estimate == pytest.approx(whole[what], rel=0.25), what


def test_what_wants_no_gradient_has_no_backward_seconds() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    for layer in list(model)[:2]:
        layer.requires_grad_(False)
    problem, _ = capture(model, 4, torch.ones(8, 16))
    seconds = [unit.backward for unit in problem.units]
    assert seconds[:2] == [0.0, 0.0] and min(seconds[2:]) > 0
    assert seconds[3] > seconds[2]  # the third passes no gradient on
