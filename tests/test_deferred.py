"""fxsched.deferred and fxsched.materialize."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fxsched
from fxsched import PlanError, schedules
from fxsched.building.draws import CHUNK, Draws
from fxsched.building.recording import Recording
from fxsched.state.unmade import UNMADE
from tests.deferred import distinct, trained


class Blocks(nn.Module):
    """Initialisations of many kinds, with dependencies, views, reads of values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(200, 150))
        self.twice = nn.Parameter(self.first.detach() * 2)  # another's values
        self.orthogonal = nn.Parameter(torch.empty(151, 130))
        nn.init.orthogonal_(self.orthogonal)
        self.cut = nn.Parameter(nn.init.trunc_normal_(torch.empty(90, 300), std=0.02))
        self.part = nn.Parameter(torch.zeros(200, 150))
        self.part.data[:, :100].normal_()
        self.part.data[5] = 7
        mask = torch.full((300, 300), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.order = torch.randperm(9).tolist()
        self.drawn = float(torch.rand(()))
        self.table = torch.randn(3, 4)  # nothing registers it
        self.wide = nn.Parameter(torch.rand(20, 30, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(20, 30).bfloat16())
        self.own = nn.Parameter(
            torch.randn(9, 9, generator=torch.Generator().manual_seed(3))
        )
        self.out = nn.Parameter(torch.randn(5, 6, out=torch.empty(0)))
        torch.manual_seed(7)
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(40, 40), 0.1))
        self.tied = self.sparse
        self.copied = nn.ModuleList(copy.deepcopy(Masked()) for _ in range(2))


class Masked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(40, 30)
        self.register_buffer("mask", torch.ones(200, 200).tril())


def normal_weight() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(40, 30))


def spectral() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(40, 30))


def lstm() -> nn.Module:
    return nn.LSTM(20, 30, 2, bidirectional=True)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def bfloat16() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30)).to(torch.bfloat16)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def deferred(build: Callable[[], nn.Module], draws: bool = True) -> nn.Module:
    with fxsched.deferred(draws):
        return build()


@pytest.mark.parametrize(
    "build", [Blocks, normal_weight, spectral, lstm, encoder, bfloat16]
)
def test_what_is_made_later_has_the_bits_of_an_ordinary_build(
    build: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(1)
    plain, after = build(), torch.rand(3)
    torch.manual_seed(1)
    model = deferred(build)
    assert torch.equal(torch.rand(3), after)
    assert any(tensor in UNMADE for tensor in tensors(model).values())
    fxsched.materialize(model)
    for name, wanted in tensors(plain).items():
        found = tensors(model)[name]
        assert torch.equal(found, wanted), name
        assert found.stride() == wanted.stride(), name
    mine, its = vars(model), vars(plain)
    for name in ("rates", "order", "drawn"):
        assert mine.get(name) == its.get(name)
    if build is Blocks:
        assert model.tied is model.sparse and torch.equal(model.table, plain.table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("length", [15, 16, 1000, 2 * CHUNK, 2 * CHUNK + 5, 3 * CHUNK])
def test_a_generator_is_where_drawing_would_have_left_it(
    length: int, dtype: torch.dtype
) -> None:
    def draw() -> None:
        torch.empty(length, dtype=dtype).uniform_(-1, 1)
        torch.empty(length, dtype=dtype).normal_(0, 2)

    torch.manual_seed(2)
    draw()
    wanted = torch.get_rng_state()
    torch.manual_seed(2)
    with Recording(True) as recording:
        draw()
    recording.advance()
    assert isinstance(recording.draws, Draws)
    recording.draws.leave()
    assert torch.equal(torch.get_rng_state(), wanted)


def test_a_model_trains_the_same_however_it_was_built() -> None:
    assert trained(schedules.one_f_one_b(2, 2), True) == trained(
        schedules.one_f_one_b(2, 2), False
    )


def test_building_and_planning_take_no_memory_for_what_is_not_made() -> None:
    with fxsched.deferred(draws=False):
        model = nn.Sequential(*(nn.Linear(1 << 15, 1 << 15) for _ in range(20)))
    loss, x = nn.Sequential(model, Mean()), torch.randn(2, 1 << 15)
    plan = fxsched.plan(loss, schedules.fsdp(2, 2), x)
    assert "GiB" in str(plan)
    assert all(tensor in UNMADE for tensor in model.parameters())


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_what_copies_a_tensor_makes_it() -> None:
    for copied in (
        lambda model: model.state_dict()["weight"],
        lambda model: copy.deepcopy(model).weight,
        lambda model: model.weight.detach(),
        lambda model: model.double().weight.float(),
    ):
        torch.manual_seed(0)
        wanted = nn.Linear(30, 40).weight
        torch.manual_seed(0)
        assert torch.equal(copied(deferred(lambda: nn.Linear(30, 40))), wanted)


def test_what_is_loaded_is_not_drawn(tmp_path: Path) -> None:
    plain = Masked()
    fxsched.save_weights(tmp_path, plain)
    before = torch.get_rng_state()
    model = deferred(Masked, draws=False)
    fxsched.load_weights(tmp_path, model)
    assert model.weight in UNMADE and torch.equal(torch.get_rng_state(), before)
    fxsched.materialize(model)
    assert distinct(model, plain) == []
    again = deferred(Masked, draws=False)
    again.load_state_dict(plain.state_dict())
    assert distinct(again, plain) == []
    with torch.no_grad():
        third = deferred(Masked, draws=False)
        third.weight.data = plain.weight.data
        third.bias.data = plain.bias.data
    assert distinct(third, plain) == []


def test_what_was_to_be_loaded_and_is_not_is_an_error() -> None:
    model = deferred(lambda: nn.Linear(30, 40), draws=False)
    with pytest.raises(PlanError, match=r"deferred\(draws=False\) makes no random num"):
        fxsched.materialize(model)


def test_what_cannot_be_put_off_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"builds models on the CPU, and aten.*xla"):
        deferred(lambda: nn.Linear(3, 3, device="xla"))
    with pytest.raises(PlanError, match=r"deferred\(\) in deferred\(\): one around"):
        deferred(lambda: deferred(lambda: nn.Linear(3, 3)))
    with pytest.raises(PlanError, match="resize_ of a tensor that isn't made yet"):
        deferred(lambda: nn.Parameter(torch.rand(3).resize_(9)))
    outside = torch.zeros(1 << 15)

    def read() -> nn.Module:
        linear = nn.Linear(1 << 15, 1)
        linear.weight.data[0].copy_(outside)
        return linear

    model = deferred(read)
    outside.add_(1)
    with pytest.raises(PlanError, match=r"that aten.copy_.default read while the mode"):
        fxsched.materialize(model)


def test_a_tensor_from_before_is_written_in_its_place() -> None:
    plain, outside = nn.Linear(30, 40), nn.Linear(30, 40)
    torch.manual_seed(4)
    nn.init.normal_(plain.weight)
    torch.manual_seed(4)
    with fxsched.deferred():
        nn.init.normal_(outside.weight)
    assert torch.equal(outside.weight, plain.weight)


def test_what_is_written_before_it_is_made_is_an_error() -> None:
    model = deferred(lambda: nn.Linear(30, 40))
    nn.init.zeros_(model.weight)
    with pytest.raises(PlanError, match=r"of shape \[40, 30\] was written before its"):
        fxsched.materialize(model)
