"""fxsched.verify: a step by a schedule beside eager PyTorch on the whole batch."""

from __future__ import annotations

import copy
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, Verification, schedules
from fxsched.backend import Backend
from fxsched.equality.verify import _Trial as Trial
from fxsched.ir.graphs import Spec
from tests.weighted import Words, batch, mean

GPIPE = schedules.gpipe(2, 4)


class Two(nn.Module):
    """Two layers, with something after them."""

    def __init__(self, after: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.dropout = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.after = after

    def forward(self, x: Tensor, factor: float = 1.0) -> Any:
        hidden = self.dropout(torch.tanh(self.first(x)))
        return self.after(self, self.second(hidden) * factor)


def rows(seed: int = 0) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))


def check(after: Callable[..., Any], **options: Any) -> Verification:
    torch._dynamo.reset()
    return fxsched.verify(Two(after), GPIPE, rows(), **options)


@pytest.mark.slow
def test_what_is_equal_passes_and_leaves_the_model_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, x = Two(lambda s, x: {"loss": x.pow(2).mean(), "x": x}), rows()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = fxsched.verify(model, GPIPE, x, factor=2.0, order="dynamic")
    assert found.passed and not found.why
    names = [each.name for each in found.differences]
    assert names[:3] == ["loss", "output ['x']", "gradient of first.weight"]
    assert capsys.readouterr().out == "" and repr(found) == str(found)
    assert str(found).endswith("PASS: all 6 values equal eager's")
    said = "\ndropout draws random numbers: here eager PyTorch gets those of the plan"
    assert said in str(found)
    torch.testing.assert_close(model.state_dict(), before)
    assert model.training and model.dropout.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("width", [70, 100])
def test_a_table_of_long_names_fits(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    model: nn.Module = nn.Linear(4, 4)
    for name in ("a_rather_long_name", "another_name_that_is_long", "and_one_more") * 2:
        model = nn.Sequential(OrderedDict([(name, model)]))
    torch._dynamo.reset()
    gpipe = schedules.gpipe(1, 2)
    text = str(fxsched.verify(model, gpipe, rows()[:, :4], loss=torch.sum))
    assert max(map(len, text.splitlines())) <= width
    names = re.findall(r"^(.*\S\.(?:weight|bias)) ", text, re.M)
    assert len(set(names)) == 2


@pytest.mark.slow
def test_rows_that_meet_are_named_with_stage_and_line() -> None:
    def pairs(s: Any, x: Tensor) -> Tensor:
        return F.cross_entropy(x @ x.t(), torch.arange(len(x)))

    assert check(pairs).passed
    found = check(pairs, stages=["second"], loss_reduction="mean")
    assert not found.passed
    assert found.why.startswith("stage 1, matmul gives something else")
    assert f"at {__file__}" in found.why and "F.cross_entropy(x @ x.t()" in found.why
    assert "every row of the batch meets every other" in found.why


@pytest.mark.slow
def test_sums_are_named() -> None:
    assert check(lambda s, x: x.sum()).passed
    found = check(lambda s, x: x.sum(), loss_reduction="mean")
    assert "the loss is a sum over the batch" in found.why
    assert 'loss_reduction="sum"' in found.why
    assert check(lambda s, x: x.sum(), loss_reduction="sum").passed


@pytest.mark.slow
def test_a_loss_outside_and_batch_statistics() -> None:
    outside = {"loss": lambda out: out.pow(2).mean()}
    assert check(lambda s, x: s.norm(x), **outside).passed
    parted = {**outside, "batch_norm": "microbatch"}
    found = check(lambda s, x: s.norm(x), **parted)
    assert "batch_norm gives something else" in found.why
    failed = {each.name for each in found.differences if not each.passed}
    assert {"loss", "output", "buffer norm.num_batches_tracked"} <= failed


@pytest.mark.slow
def test_batch_statistics_before_rows_meet_are_named() -> None:
    def pairs(s: Any, x: Tensor) -> Tensor:
        x = s.norm(x)
        return F.cross_entropy(x @ x.t(), torch.arange(len(x)))

    assert check(pairs).passed
    found = check(pairs, batch_norm="microbatch")
    assert not found.passed
    assert "batch_norm" in found.why


@pytest.mark.slow
def test_eager_is_given_the_random_numbers_of_the_plan() -> None:
    def drawing(s: Any, x: Tensor) -> Tensor:
        order = torch.randperm(len(x))
        noise = torch.randn(3, len(x), 6).mean(0) + torch.rand(1)
        x = x + F.gumbel_softmax(noise * F.dropout(x)[order])
        return (x @ F.dropout(s.second.weight)).square().mean()

    assert check(drawing).passed


@pytest.mark.slow
def test_what_is_read_of_all_rows_after_a_write_and_draws() -> None:
    def written(s: Any, x: Tensor) -> Tensor:
        x = torch.nn.functional.dropout(x, 0.25)
        copy, out = x.clone(), torch.zeros_like(x)
        copy[:, 1] += x[:, 0]
        out[:, :2] = copy[:, :2]
        out[:, 2:] = (copy - copy.topk(2, 0).values.mean(0))[:, 2:]
        return out.square().mean()

    assert check(written).passed


@pytest.mark.slow
def test_random_numbers_that_eager_draws_otherwise_are_named() -> None:
    def drawing(s: Any, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            torch.rand(2)
        return F.dropout(x).mean()

    found = check(drawing)
    assert "aten.rand.default draws random numbers otherwise in eager" in found.why


@pytest.mark.slow
def test_what_is_rounding_in_float32_is_repeated_in_float64() -> None:
    def cancelling(s: Any, x: Tensor) -> Tensor:
        return x.square().mean() + 3e4 - 3e4

    def narrow(s: Any, x: Tensor) -> Tensor:
        return cancelling(s, x @ torch.eye(6, dtype=torch.float32))

    found = check(cancelling)
    assert found.passed
    assert "in the model's type, is rounding" in str(found)
    found = check(narrow)
    assert not found.passed
    assert "not repeated in float64, in which the model doesn't run" in str(found)


class Unit(torch.autograd.Function):
    """A gradient of norm 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / g.norm()


def own_function(s: Any, x: Tensor) -> Tensor:
    return Unit.apply(x).square().mean()


def hook(s: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: g - g.mean(0))
    return x.tanh().square().mean()


def pairs_and_function(s: Any, x: Tensor) -> Tensor:
    pairs = F.cross_entropy(x @ x.t(), torch.arange(len(x)))
    return pairs + Unit.apply(x).square().mean()


def center(s: Any, x: Tensor) -> Tensor:
    loss = (x - s.center).square().mean()
    s.center = s.center * 0.9 + x.detach().mean(0) * 0.1
    return loss


def statistic(s: Any, x: Tensor) -> Tensor:
    s.center.lerp_(x.detach().mean(0), 0.1)
    return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "line"),
    [
        (own_function, "return Unit.apply(x).square().mean()"),
        (hook, "x.register_hook(lambda g: g - g.mean(0))"),
        (pairs_and_function, "return pairs + Unit.apply(x).square().mean()"),
        (center, "s.center = s.center * 0.9"),
        (statistic, "s.center.lerp_(x.detach().mean(0), 0.1)"),
    ],
)
def test_gradients_and_buffers_that_depart_are_named(
    after: Callable[..., Any], line: str
) -> None:
    """Or the model is refused, or equal, before they could: never an unnamed fault."""
    torch._dynamo.reset()
    model = Two(after)
    model.register_buffer("center", torch.zeros(6))
    try:
        found = fxsched.verify(model, GPIPE, rows())
    except PlanError as refused:
        assert line in str(refused)
        return
    if not found.passed:
        kind = "the buffer center departs" if "center" in line else "gradient departs"
        assert kind in found.why and line in found.why, found.why


@pytest.mark.slow
def test_an_operation_without_a_rule_is_found_by_running_it() -> None:
    def sorted_rows(s: Any, x: Tensor) -> Tensor:
        return (torch.searchsorted(torch.zeros(1), x) * x.t().contiguous().t()).mean()

    def distances(s: Any, x: Tensor) -> Tensor:
        return F.pdist(x).mean()

    assert check(sorted_rows).passed and check(distances).passed
    found = check(distances, loss_reduction="mean")
    assert "pdist gives something else" in found.why


@pytest.mark.slow
def test_ignored_labels_are_named_and_weighted_passes() -> None:
    torch._dynamo.reset()
    assert fxsched.verify(Words(mean), GPIPE, *batch()).passed
    torch._dynamo.reset()
    found = fxsched.verify(Words(mean), GPIPE, *batch(), loss_reduction="mean")
    assert "mean over the labels that are not -100" in found.why
    assert fxsched.verify(
        Words(mean), GPIPE, *batch(), loss_reduction="weighted"
    ).passed


def test_models_that_cannot_be_compared() -> None:
    with pytest.raises(PlanError, match="returns 0 scalars with a gradient"):
        check(lambda s, x: x)
    with pytest.raises(PlanError, match=r"give a torch\.nn\.Module"):
        fxsched.verify(torch.relu, GPIPE, rows())  # type: ignore[arg-type]


def test_verify_runs_the_plan_that_trains_with_the_inputs_strides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Spec] = []
    make = Backend.make

    def seen(backend: Backend, gm: Any, args: Any) -> Any:
        given = (each for each in args if isinstance(each, Tensor))
        made.extend(Spec.of(each) for each in given if each.shape == (8, 6))
        return make(backend, gm, args)

    monkeypatch.setattr(Backend, "make", seen)
    model = Two(lambda s, x: x.square().mean() + 3e4 - 3e4)  # repeated in float64
    wide = torch.cat([rows(), rows(1)], 1)
    for x in (wide[:, 1:7], wide[:, ::2], wide[:, :1].expand(8, 6)):
        torch._dynamo.reset()
        before = len(made)
        assert fxsched.verify(model, GPIPE, x).passed
        assert {spec.stride for spec in made[before:]} == {x.stride()}
    assert {spec.dtype for spec in made} == {torch.float32, torch.float64}


def test_a_rounded_difference_is_named_by_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Two(lambda s, x: x.square().mean() + 3e4 - 3e4)
    rounded = fxsched.verify(model, GPIPE, rows())
    said = re.search(r"the largest difference, (\S+) in the model", str(rounded))
    monkeypatch.setattr(
        sys.modules[Trial.__module__],
        "_in_float64",
        lambda call, given, found: (found, ""),
    )
    shown = fxsched.verify(model, GPIPE, rows())
    assert said is not None
    assert said[1] == f"{max(each.largest for each in shown.differences):.1e}"


class Centered(nn.Module):
    """The true gradient of the convolution's bias is 0. It runs in float32 alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv1d(20, 48, 3), nn.BatchNorm1d(48)
        self.out = nn.Linear(48, 10)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x = F.silu(self.norm(self.conv(x))).mean(-1)
        return F.cross_entropy(self.out(x @ torch.eye(48, dtype=torch.float32)), label)


@pytest.mark.slow
def test_rounding_of_a_gradient_of_0_passes_where_float64_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(32, 20, 200), torch.arange(32) % 10
    torch._dynamo.reset()
    found = fxsched.verify(Centered(), GPIPE, *inputs)
    assert found.passed
    assert "gradient of conv.bias: the difference is rounding, as large" in str(found)

    values = Trial.values

    def changed(trial: Trial, step: Any) -> dict[str, Any]:
        found = values(trial, step)
        if step is not trial.model:  # the plan's: by 4e-5 of the weight's gradient
            found["gradient of conv.bias"] += 1e-6
        return found

    monkeypatch.setattr(Trial, "values", changed)
    torch._dynamo.reset()
    found = fxsched.verify(Centered(), GPIPE, *inputs)
    failed = [each.name for each in found.differences if not each.passed]
    assert failed == ["gradient of conv.bias"]
    assert "please report it" in found.why and "encode" not in found.why
    torch._dynamo.reset()
    encode = {"activations": torch.bfloat16}
    found = fxsched.verify(Centered(), GPIPE, *inputs, encode=encode)
    assert found.why.endswith("is eager's, so it comes of encode=")
