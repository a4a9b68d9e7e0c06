"""loss_reduction="weighted": eager's loss of the whole batch, whatever is ignored."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import fxsched
from fxsched import PlanError, Schedule, schedules
from tests.cases import anything
from tests.started_ranks import run_ranks
from tests.weighted import (
    IGNORED,
    LOSSES,
    Words,
    batch,
    eager,
    gradients,
    mean,
    planned,
)

# an earlier default, in which the losses of microbatches are simply averaged
pytestmark = pytest.mark.filterwarnings("error::fxsched.RowsWarning")


@pytest.mark.parametrize("name", LOSSES)
def test_weighted_means_are_eagers(name: str) -> None:
    wanted = eager(Words(LOSSES[name]), *batch())
    assert_close(planned(Words(LOSSES[name]), schedules.gpipe(2, 4), *batch()), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (schedules.fslpp(4, 2, 4), {"carry": "recompute", "order": "dynamic"}),
        (schedules.zb_h1(2, 4), {}),
        (anything(5), {}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_under_every_schedule(schedule: Schedule, options: dict[str, Any]) -> None:
    wanted = eager(Words(LOSSES["several"]), *batch())
    found = planned(Words(LOSSES["several"]), schedule, *batch(), **options)
    assert_close(found, wanted)


@pytest.mark.slow
def test_weights_are_those_of_each_batch() -> None:
    words, labels = batch()
    model = Words(mean)
    backend = fxsched.backend(schedules.gpipe(2, 4), loss_reduction="weighted")
    step = torch.compile(model, backend=backend)
    for each in (labels, labels.roll(1, 0), labels.clamp(min=0), labels[:4]):
        assert_close(step(words[: len(each)], each), model(words[: len(each)], each))
        with torch.no_grad():
            assert_close(
                step(words[: len(each)], each), model(words[: len(each)], each)
            )


def test_the_mean_of_microbatches_is_warned_of_and_differs() -> None:
    wanted, _ = eager(Words(mean), *batch())
    with pytest.warns(fxsched.RowsWarning, match='loss_reduction="weighted"'):
        loss, _ = planned(
            Words(mean), schedules.gpipe(2, 4), *batch(), loss_reduction="mean"
        )
    assert abs(float(loss - wanted)) > 1e-3


@pytest.mark.slow
def test_a_sum_and_a_count_are_divided_after_the_call() -> None:
    def both(model: nn.Module, scores: Tensor, labels: Tensor) -> Any:
        keep = labels != IGNORED
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, keep.sum()

    def by_model(model: nn.Module, scores: Tensor, labels: Tensor) -> Any:
        weights = scores[..., 0].detach().exp()
        return (scores[..., 1] * weights).sum(), weights.sum()

    for each in (both, by_model):
        model, plain = Words(each), Words(each)
        step = torch.compile(
            model,
            backend=fxsched.backend(schedules.gpipe(2, 4), loss_reduction="weighted"),
        )
        for run in (step, plain):
            total, count = run(*batch())
            (total / count).backward()
        assert_close(step(*batch()), plain(*batch()))
        assert_close(gradients(model), gradients(plain))


@pytest.mark.slow
def test_padded_labels_in_llama() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=20,
        use_cache=False,
    )
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(config)
    words, labels = batch()
    inputs = {"input_ids": words, "labels": labels}
    plain = copy.deepcopy(model)
    wanted = plain(**inputs).loss
    wanted.backward()
    for reduction in ("mean", "weighted"):
        torch._dynamo.reset()
        backend = fxsched.backend(schedules.gpipe(2, 4), loss_reduction=reduction)
        step = torch.compile(model, backend=backend)
        model.zero_grad()
        if reduction == "mean":
            with pytest.warns(fxsched.RowsWarning, match="labels that are not -100"):
                loss = step(**inputs).loss
            assert not torch.isclose(loss, wanted)
        else:
            loss = step(**inputs).loss
            loss.backward()
            assert_close((loss, gradients(model)), (wanted, gradients(plain)))


def refused(compute: Any, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        planned(Words(compute), schedules.gpipe(2, 4), *batch())


@pytest.mark.slow
def test_what_no_weights_make_exact_is_refused() -> None:
    def spread(model: nn.Module, scores: Tensor, labels: Tensor) -> Tensor:
        return scores.std()

    def by_model(model: nn.Module, scores: Tensor, labels: Tensor) -> Tensor:
        weights = scores[..., 0].exp()
        return (scores[..., 1] * weights).sum() / weights.sum()

    def by_class(model: nn.Module, scores: Tensor, labels: Tensor) -> Tensor:
        weight = torch.arange(1.0, 21.0)
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), weight)

    refused(spread, r"statistics of the whole batch \(aten.std[^)]*\)\n.*scores.std")
    refused(by_model, r"one reduction over the batch divided by another(.|\n)*weights")
    refused(by_class, "the sum of the class weights of the labels is not known")


@pytest.mark.slow
def test_two_ranks() -> None:
    done = run_ranks(2, "tests.ranks_losses")
    assert done.stdout.count("equal to eager") == 4, done.stdout


@pytest.mark.slow
def test_explain_says_what_weighs_a_loss() -> None:
    schedule = schedules.gpipe(2, 4)
    plan = fxsched.plan(Words(LOSSES["mean"]), schedule, *batch())
    text = " ".join(plan.explain().split())
    said = "are computed on the whole batch before the step (8 B)"
    assert said in text
    plain = fxsched.plan(Words(LOSSES["mean"]), schedules.gpipe(2, 1), *batch())
    assert "that only inputs decide" not in plain.explain()


class Keeps(nn.Module):
    """Keeps what inputs alone decide, beside a loss over labels of which some are
    ignored."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 5), how
        self.register_buffer("seen", torch.zeros(4))
        self.seen: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = x.detach().sum(0)
        if self.how == "added":
            self.seen.add_(total / 2)
        elif self.how == "moved":
            self.seen.copy_(0.9 * self.seen + total)
        elif self.how == "replaced":
            self.seen = self.seen + total
        elif self.how == "+=":
            self.seen *= 0.9
            self.seen += total
        else:
            self.seen.copy_(total)
        return F.cross_entropy(self.linear(x), y)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["weighted", "mean", "sum"])
def test_state_of_the_batch_is_refused_where_microbatches_would_write_it(
    reduction: Any,
) -> None:
    class Statistic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 5)
            self.register_buffer("mean", torch.zeros(5))
            self.mean: Tensor

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = self.linear(x)
            with torch.no_grad():
                self.mean.lerp_(z.mean(0), 0.1)
            return F.cross_entropy(z, y)

    given = torch.randn(8, 4), torch.arange(8) % 5
    backend = fxsched.backend(schedules.gpipe(2, 4), loss_reduction=reduction)
    model = Statistic()
    with pytest.raises(PlanError, match=r"into its own state.*\n  at .*lerp_"):
        torch.compile(model, backend=backend)(*given)
    assert not model.mean.any()
    torch._dynamo.reset()
    plain = copy.deepcopy(model)
    backend = fxsched.backend(schedules.gpipe(2, 4))
    assert_close(torch.compile(model, backend=backend)(*given), plain(*given))
    assert_close(model.mean, plain.mean)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["weighted", "mean"])
def test_a_counter_counts_calls(reduction: Any) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 5)
            self.register_buffer("calls", torch.zeros(()))
            self.calls: Tensor

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.calls.add_(1)
            return F.cross_entropy(self.linear(x) * self.calls, y)

    model = Counts()
    backend = fxsched.backend(schedules.ddp(2, 4), loss_reduction=reduction)
    run, plain = torch.compile(model, backend=backend), copy.deepcopy(model)
    given = torch.randn(8, 4), torch.arange(8) % 5
    for _ in range(2):
        assert_close(run(*given), plain(*given))
    assert_close(model.calls, plain.calls)


@pytest.mark.parametrize("reduction", ["weighted", "exact"])
@pytest.mark.parametrize("how", ["set", "added", "moved", "+=", "replaced"])
def test_totals_may_be_state(how: str, reduction: Any) -> None:
    model = Keeps(how)
    plain, x = copy.deepcopy(model), torch.randn(8, 4)
    backend = fxsched.backend(schedules.gpipe(1, 4), loss_reduction=reduction)
    run = torch.compile(model, backend=backend)
    labels = torch.arange(8) % 5
    labels[:3] = -100
    for _ in range(2):
        assert_close(run(x, labels), plain(x, labels))
        assert_close(model.seen, plain.seen)


@pytest.mark.parametrize("outputs", [{}, {1: "sum"}])
def test_what_totals_decide_may_be_returned(outputs: Any) -> None:
    class Returns(Keeps):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x, y), x.sum(0) / 2

    model, x, labels = Returns("+="), torch.randn(8, 4), torch.arange(8) % 5 - 1
    labels[labels < 0] = -100
    backend = fxsched.backend(schedules.gpipe(2, 4), outputs=outputs)
    plain = copy.deepcopy(model)
    assert_close(torch.compile(model, backend=backend)(x, labels), plain(x, labels))


@pytest.mark.parametrize("by", [None, "microbatch"])
def test_a_batch_norm_may_read_state_that_totals_move(by: Any) -> None:
    class Centred(Keeps):
        def __init__(self) -> None:
            super().__init__("+=")
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.seen.lerp_(x.mean(0), 0.1)
            return F.cross_entropy(self.linear(self.norm(x - self.seen)), y)

    model, x, labels = Centred(), torch.randn(8, 4), torch.arange(8) % 5
    plain = copy.deepcopy(model)
    backend = fxsched.backend(schedules.gpipe(2, 4), batch_norm=by)
    with warnings.catch_warnings():  # of statistics of a microbatch
        warnings.simplefilter("ignore", fxsched.RowsWarning)
        loss = torch.compile(model, backend=backend)(x, labels)
    whole = plain(x, labels)
    assert_close(model.seen, plain.seen)
    if by is None:
        assert_close(loss, whole)
