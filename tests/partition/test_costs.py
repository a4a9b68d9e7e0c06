"""Estimated costs: of one operation, of a node's F and B, and of whole stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import nn

import fxsched
from fxsched import schedules
from fxsched.ir.request import Device
from fxsched.partition import costs
from fxsched.partition.costs import OTHER, RATES, Cost, Meter, cost_of, rates_of
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


def test_an_lstm_has_flops_both_ways() -> None:
    """oneDNN's layer and its backward are one operation each."""
    layer, x = nn.LSTM(8, 16, 2, bidirectional=True), torch.ones(5, 3, 8)
    with Meter() as forward:
        out, _ = layer(x)
    with Meter() as backward:
        out.sum().backward()
    matrices = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    assert forward.total.flops == 2 * 5 * 3 * matrices
    assert backward.total.flops == 2 * forward.total.flops


def test_a_cut_beside_an_lstm_counts_its_time_steps() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(256, 256, batch_first=True)
            self.rest = nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rest(self.lstm(x)[0]).square().mean()

    model, inputs = Tagger(), torch.randn(16, 32, 256)
    problem, _ = capture(model, 4, inputs)
    whole = fxsched.plan(model, schedules.gpipe(1, 4), inputs).stages.nodes[0]
    for what in ("forward", "backward"):
        estimate = sum(getattr(unit, what) for unit in problem.units)
        assert estimate == pytest.approx(whole[what], rel=0.3)


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


class Mixed(nn.Module):
    """A layer in float64, and three in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.exact = nn.Linear(512, 512).double()
        self.rest = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.exact(x).float()).sum()


def mixed_plan(device: Device | None) -> fxsched.Plan:
    with torch.device("meta"):
        model, x = Mixed(), torch.ones(4096, 512, dtype=torch.float64)
    return fxsched.plan(model, schedules.gpipe(2, 4), x, device=device)


def test_stages_are_cut_by_the_rates_of_the_named_device() -> None:
    """float64 is half as fast as float32 on a CPU, and 1/64 as fast on an A10."""
    here, there = mixed_plan(None), mixed_plan("A10")
    assert here.stages.nodes[0]["modules"] == ["exact", "rest.0"]
    assert there.stages.nodes[0]["modules"] == ["exact"]
    assert "costs are estimates for device='A10'" in there.explain()
    assert "device=" not in here.explain()
    assert mixed_plan("cpu").simulate().latency == here.simulate().latency


def test_a_step_takes_longer_on_a_slower_device() -> None:
    h100, a100, a10 = (mixed_plan(name).simulate().latency for name in GPUS)
    assert h100 < a100 < a10


GPUS: tuple[Device, ...] = ("H100", "A100", "A10")


@pytest.mark.parametrize(
    "dtype, rate",
    [
        (torch.bfloat16, 989e12),
        (torch.float16, 989e12),
        (torch.float32, 67e12),
        (torch.float64, 67e12),
        (torch.int8, 67e12),
    ],
)
def test_a_product_costs_by_its_type(dtype: torch.dtype, rate: float) -> None:
    x = torch.ones(4096, 4096, dtype=dtype, device="meta")
    flops, _, seconds = cost_of(aten.mm.default, (x, x), {}, x, "H100")
    assert seconds == pytest.approx(flops / rate + RATES["H100"].launch)


def test_float32_counts_as_tf32_where_torch_may_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = RATES["H100"]
    for name, func in (("MATRICES", aten.mm), ("CONVOLUTIONS", aten.convolution)):
        for precision, flops in (("ieee", 67e12), ("tf32", 494e12)):
            flags = SimpleNamespace(fp32_precision=precision)
            monkeypatch.setattr(costs, name, flags)
            assert rates.flops(torch.float32, func) == flops
            assert rates.flops(torch.float64, func) == 67e12


def test_models_are_planned_with_either_of_torchs_settings_of_tf32() -> None:
    """Reading the older one raises once the newer one was set."""
    flags = costs.MATRICES
    before = flags.fp32_precision
    try:
        flags.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="mix of the legacy"):
            torch.get_float32_matmul_precision()
        fxsched.plan(nn.Linear(4, 4), schedules.gpipe(1, 1), torch.ones(4, 4))
    finally:
        flags.fp32_precision = before


def test_every_device_that_may_be_named_has_rates() -> None:
    assert {*RATES} == {*get_args(Device), OTHER}


@pytest.mark.parametrize(
    "name, row",
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", OTHER),
        ("AMD Instinct MI300X", OTHER),
    ],
)
def test_a_gpu_is_known_by_its_name(
    name: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    costs._row.cache_clear()
    assert rates_of(torch.device("cuda"), None) is RATES[row]
    assert rates_of(torch.device("cuda"), "L4") is RATES["L4"]
    costs._row.cache_clear()


def test_a_profile_is_of_one_device_and_a_plan_for_another_refuses_it() -> None:
    model, x = nn.Linear(4, 4), torch.ones(4, 4)
    profile = fxsched.profile(model, x)
    with pytest.raises(fxsched.PlanError, match=r"profile=, device='A100'.*leave one"):
        fxsched.backend(schedules.gpipe(1, 1), profile=profile, device="A100")
    fxsched.backend(schedules.gpipe(1, 1), profile=True, device="A100")
