"""fxsched.verify: a step by a schedule beside eager PyTorch on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, Verification, schedules
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


def test_what_is_equal_passes_and_leaves_the_model_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, x = Two(lambda s, x: {"loss": x.pow(2).mean(), "x": x}), rows()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = fxsched.verify(model, GPIPE, x, factor=2.0, order="dynamic")
    assert found.passed and not found.why
    names = [each.name for each in found.differences]
    assert names[:3] == ["loss", "output ['x']", "gradient of first.weight"]
    assert capsys.readouterr().out == f"{found}\n"
    assert str(found).endswith("PASS: all 6 values are eager's")
    assert "nn.Dropout is off in both" in str(found)
    torch.testing.assert_close(model.state_dict(), before)
    assert model.training and model.dropout.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_that_meet_are_named_with_stage_and_line() -> None:
    def pairs(s: Any, x: Tensor) -> Tensor:
        return F.cross_entropy(x @ x.t(), torch.arange(len(x)))

    assert check(pairs).passed
    found = check(pairs, stages=["second"], loss_reduction="mean")
    assert not found.passed
    assert found.why.startswith("stage 1, matmul gives something else")
    assert f"at {__file__}" in found.why and "F.cross_entropy(x @ x.t()" in found.why
    assert "every row of the batch meets every other" in found.why


def test_sums_are_named() -> None:
    assert check(lambda s, x: x.sum()).passed
    found = check(lambda s, x: x.sum(), loss_reduction="mean")
    assert "the loss is a sum over the batch" in found.why
    assert 'loss_reduction="sum"' in found.why
    assert check(lambda s, x: x.sum(), loss_reduction="sum").passed


def test_a_loss_outside_and_batch_statistics() -> None:
    found = check(lambda s, x: s.norm(x), loss=lambda out: out.pow(2).mean())
    assert "batch_norm gives something else" in found.why
    failed = {each.name for each in found.differences if not each.passed}
    assert {"loss", "output", "buffer norm.num_batches_tracked"} <= failed


def test_batch_statistics_before_rows_meet_are_named() -> None:
    def pairs(s: Any, x: Tensor) -> Tensor:
        x = s.norm(x)
        return F.cross_entropy(x @ x.t(), torch.arange(len(x)))

    found = check(pairs)
    assert not found.passed
    assert "batch_norm" in found.why


def test_random_numbers_are_named() -> None:
    found = check(lambda s, x: F.dropout(x).mean())
    assert "dropout_1 draws random numbers" in found.why
    assert "compare with model.eval()" in found.why


def test_an_operation_without_a_rule_is_found_by_running_it() -> None:
    def sorted_rows(s: Any, x: Tensor) -> Tensor:
        return (torch.searchsorted(torch.zeros(1), x) * x.t().contiguous().t()).mean()

    def distances(s: Any, x: Tensor) -> Tensor:
        return F.pdist(x).mean()

    assert check(sorted_rows).passed and check(distances).passed
    found = check(distances, loss_reduction="mean")
    assert "pdist gives something else" in found.why


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
