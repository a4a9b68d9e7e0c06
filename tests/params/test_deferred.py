"""fxsched.deferred and fxsched.materialize."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fxsched
from fxsched import PlanError, schedules
from fxsched.params.draws import CHUNK
from fxsched.params.record import record_of
from fxsched.params.recording import Recording
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
    assert any(record_of(tensor).lazy for tensor in tensors(model).values())
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
    with Recording(True):
        draw()
    assert torch.equal(torch.get_rng_state(), wanted)


@pytest.mark.slow
def test_a_model_trains_the_same_however_it_was_built() -> None:
    assert trained(schedules.one_f_one_b(2, 2), True) == trained(
        schedules.one_f_one_b(2, 2), False
    )


@pytest.mark.slow
def test_building_and_planning_take_no_memory_for_what_is_not_made() -> None:
    with fxsched.deferred(draws=False):
        model = nn.Sequential(*(nn.Linear(1 << 15, 1 << 15) for _ in range(20)))
    loss, x = nn.Sequential(model, Mean()), torch.randn(2, 1 << 15)
    plan = fxsched.plan(loss, schedules.fsdp(2, 2), x)
    assert "GiB" in str(plan)
    assert all(record_of(tensor).lazy for tensor in model.parameters())


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_what_copies_a_tensor_makes_it() -> None:
    for copied in (
        lambda model: model.state_dict()["weight"],
        lambda model: copy.deepcopy(model).weight,
        lambda model: model.weight.detach(),
        lambda model: model.double().weight.float(),
        lambda model: model.type(torch.double).weight.float(),
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
    assert record_of(model.weight).lazy and torch.equal(torch.get_rng_state(), before)
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


def test_state_of_the_optimizer_is_loaded_whatever_gives_the_values(
    tmp_path: Path,
) -> None:
    plain = nn.Linear(30, 40)
    optimizer = torch.optim.AdamW(plain.parameters())
    plain(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    fxsched.save(tmp_path / "all", plain, optimizer)
    fxsched.save_weights(tmp_path / "weights", plain)
    model = deferred(lambda: nn.Linear(30, 40), draws=False)
    again = torch.optim.AdamW(model.parameters())
    fxsched.load(tmp_path / "all", model, again)
    model.bias.data = plain.bias.data
    fxsched.load_weights(tmp_path / "weights", model)
    fxsched.materialize(model)
    assert distinct(model, plain) == []
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        found, wanted = again.state[mine], optimizer.state[its]
        assert torch.equal(found["exp_avg"], wanted["exp_avg"])


def test_what_was_to_be_loaded_and_is_not_is_an_error() -> None:
    model = deferred(lambda: nn.Linear(30, 40), draws=False)
    with pytest.raises(PlanError, match=r"deferred\(draws=False\) draws no random num"):
        fxsched.materialize(model)


def test_what_cannot_be_put_off_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"builds models on the CPU, and aten.*xla"):
        deferred(lambda: nn.Linear(3, 3, device="xla"))
    with pytest.raises(PlanError, match=r"deferred\(\) in deferred\(\): one around"):
        deferred(lambda: deferred(lambda: nn.Linear(3, 3)))
    with pytest.raises(
        PlanError, match="resize_ is called on a tensor that isn't made yet"
    ):
        deferred(lambda: nn.Parameter(torch.rand(3).resize_(9)))
    with pytest.raises(PlanError, match="a conjugate or negative view, which deferred"):
        deferred(lambda: Held(torch.randn(20, 30, dtype=torch.cfloat).conj()))
    with pytest.raises(PlanError, match=r"aten.* must draw its numbers at once"):
        deferred(lambda: Held(torch._sample_dirichlet(torch.ones(9))), draws=False)


class Held(nn.Module):
    """Some tensors as parameters or buffers."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        for i, each in enumerate(tensors):
            real = each.is_floating_point() or each.is_complex()
            self.register_buffer(f"held{i}", nn.Parameter(each) if real else each)


def seeded_alike() -> nn.Module:
    """The generator is read, set back and seeded with what it was seeded with."""
    state = torch.get_rng_state()
    first = torch.randn(20, 30)
    torch.set_rng_state(state)
    with torch.random.fork_rng():
        second = torch.randn(20, 30)
    third, kept = torch.randn(20, 30), torch.get_rng_state()
    own = torch.Generator().manual_seed(2)
    fourth = torch.randn(20, 30, generator=own)
    own.manual_seed(2)
    fifth = torch.randn(20, 30, generator=own)
    sampled = torch._sample_dirichlet(torch.rand(9))
    return Held(first, second, third, fourth, fifth, kept, sampled)


def shared_with_numpy() -> nn.Module:
    """Memory is read and written without operations."""
    blank, kept = torch.empty(200, 200), torch.zeros(200, 200)
    blank.numpy()[:] = 3
    kept.copy_(blank)
    scratch, copied = np.ones((200, 200), np.float32), torch.zeros(200, 200)
    copied.copy_(torch.from_numpy(scratch))
    scratch *= 2
    drawn = torch.randn(20, 30)
    seen = drawn.numpy()
    drawn.normal_()
    seen *= 2
    return Held(blank, kept, copied, drawn, torch.full((), float(seen.mean())))


def copied_and_changed() -> nn.Module:
    """What is read, pickled or copied onto itself is written later."""
    table = torch.tensor([float(i) for i in range(20000)])
    read = torch.zeros(20000).copy_(table)
    table.data.mul_(2)
    square = torch.from_numpy(np.arange(40000.0).reshape(200, 200))
    square.copy_(square.t().clone())
    vectors = torch.linalg.svd(torch.randn(30, 20), full_matrices=False)[2]
    pickled = pickle.loads(pickle.dumps(nn.Parameter(torch.randn(20, 30)).detach()))
    whole = torch.arange(40000)
    return Held(table, read, square, vectors, pickled, whole)


@pytest.mark.parametrize("build", [seeded_alike, shared_with_numpy, copied_and_changed])
def test_generators_and_memory_are_as_in_an_ordinary_build(
    build: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(1)
    wanted, after = tensors(build()), torch.get_rng_state()
    torch.manual_seed(1)
    model = deferred(build)
    assert torch.equal(torch.get_rng_state(), after)
    found = tensors(model)
    assert not any(
        record_of(n).lazy and not n.is_floating_point() for n in found.values()
    )
    fxsched.materialize(model)
    for name, each in wanted.items():
        assert torch.equal(found[name], each), name
        assert found[name].stride() == each.stride(), name


def test_lazy_modules_stay_lazy() -> None:
    assert nn.parameter.is_lazy(deferred(lambda: nn.LazyLinear(3)).weight)


def test_an_exception_leaves_what_was_built_with_its_values() -> None:
    wanted, outside = torch.ones(20, 30), torch.ones(20, 30)
    torch.manual_seed(1)
    nn.init.normal_(wanted)
    torch.manual_seed(1)
    with pytest.raises(KeyError), fxsched.deferred():
        nn.init.normal_(outside)
        raise KeyError
    assert torch.equal(outside, wanted)


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
    model = deferred(lambda: nn.Linear(30, 40))
    model.bias.data.zero_()
    with pytest.raises(PlanError, match=r"of shape \[40\] was written before its"):
        fxsched.materialize(model)
    pair = deferred(lambda: nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30)))
    pair[0].weight.data = pair[1].weight.data
    with pytest.raises(PlanError, match=r"was given the memory of another before its"):
        fxsched.materialize(pair)
