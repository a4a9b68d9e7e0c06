"""Outputs beside the loss: what they become is known, declared, or an error."""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules

MICROBATCHES = 4


@dataclass
class Found:
    loss: Tensor
    correct: Tensor
    worst: Tensor


Pair = namedtuple("Pair", ["loss", "correct"])


class Model(nn.Module):
    def __init__(self, give: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.give, self.last = give, torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        each = self.second(torch.tanh(self.first(x))).pow(2).mean(1) * self.scale
        return self.give(self, x, each)


def run(
    give: Any, schedule: Any = None, **options: Any
) -> tuple[Any, Any, Model, Model, Tensor]:
    """What a plan gives, and eager on the whole batch."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(give)
    reference, x = copy.deepcopy(model), torch.randn(8, 8)
    schedule = schedule or schedules.gpipe(2, MICROBATCHES)
    step = torch.compile(model, backend=fxsched.backend(schedule, **options))
    return step(x), reference(x), model, reference, x


def correct(each: Tensor) -> Tensor:
    return (each > 0.1).sum()


def as_dict(model: Model, x: Tensor, each: Tensor) -> Any:
    return {"loss": each.mean(), "stats": {"correct": correct(each).float()}}


def as_tuple(model: Model, x: Tensor, each: Tensor) -> Any:
    return each.mean(), None, correct(each), each.detach().max(), each.detach().min()


def as_dataclass(model: Model, x: Tensor, each: Tensor) -> Any:
    return Found(each.mean(), correct(each), each.detach().max())


def as_pair(model: Model, x: Tensor, each: Tensor) -> Any:
    return Pair(each.mean(), each.detach().sum())


DECLARED = [
    (as_dict, {}),
    (as_pair, {}),
    (as_tuple, {3: "max", 4: "min"}),
    (as_dataclass, {"correct": "sum", "worst": "max"}),
]


@pytest.mark.parametrize(("give", "outputs"), DECLARED)
def test_a_scalar_beside_the_loss_is_known_or_what_the_user_says(
    give: Any, outputs: Any
) -> None:
    found, wanted, *_ = run(give, outputs=outputs)
    torch.testing.assert_close(vars_of(found), vars_of(wanted))


def vars_of(value: Any) -> Any:
    return vars(value) if isinstance(value, Found) else value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("give", "names"), [(as_tuple, [3, 4]), (as_dataclass, ["worst"])]
)
def test_without_a_word_it_is_exact_or_an_error_with_the_line_to_write(
    give: Any, names: Any
) -> None:
    found, wanted, *_ = run(give)
    torch.testing.assert_close(vars_of(found), vars_of(wanted))
    with pytest.raises(PlanError) as error:
        run(give, loss_reduction="mean")
    for name in names:
        assert f"output {name!r}, " in str(error.value)
    line = str(error.value).split("backend(outputs=")[1].split("}")[0] + "}"
    assert list(eval(line)) == names
    run(give, outputs=eval(line))


def test_the_mean_and_the_last() -> None:
    found, _, model, _, x = run(
        lambda m, x, e: (e.mean(), e.detach().mean(), e.detach()[-1].sum()),
        outputs={1: "mean", 2: "last"},
    )
    wanted = model(x)
    torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_several_losses_get_gradients() -> None:
    def give(model: Model, x: Tensor, each: Tensor) -> Any:
        return each.mean(), each.pow(2).sum(), model.scale.exp(), each.max()

    with pytest.raises(PlanError, match=r"outputs=\{3: 'mean'\}"):
        run(give, loss_reduction="mean")
    outputs = {3: "max"}
    for options, most in (({"outputs": outputs}, 0), ({}, 3)):
        found, wanted, model, reference, _ = run(give, **options)
        torch.testing.assert_close(found, wanted)
        for value in (found, wanted):
            loss = value[0] + 0.5 * value[1] + 2 * value[2]
            (loss + most * value[3] if most else loss).backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        for mine, other in pairs:
            torch.testing.assert_close(mine.grad, other.grad)
    found, *_ = run(give, outputs=outputs)
    with pytest.raises(RuntimeError, match="3 got a gradient, but it is the max"):
        (found[0] + found[3]).backward()


@pytest.mark.slow
def test_what_no_row_goes_into_is_the_same_for_all() -> None:
    def give(model: Model, x: Tensor, each: Tensor) -> Any:
        table = torch.arange(4)[None] - torch.arange(4)[:, None]
        return {
            "loss": each.mean(),
            "scale": model.scale.detach().exp(),
            "table": table + model.scale.detach(),
            "four": torch.tensor(4),
            "ones": torch.ones(3, 2),
            "batch": x.shape[0],
            "double": 2 * x.shape[0] + 1,
            "width": x.shape[1],
        }

    found, wanted, *_ = run(give)
    torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_what_is_stored_counts_as_an_output() -> None:
    def give(model: Model, x: Tensor, each: Tensor) -> Any:
        model.last = each.detach().amax()
        model.rows = each.detach()
        return each.mean()

    with pytest.raises(PlanError, match=r"which the model assigns to, float32"):
        run(give, loss_reduction="mean")
    for outputs in ({"self.last": "max"}, {}):
        _, _, model, reference, _ = run(give, outputs=outputs)
        torch.testing.assert_close(model.last, reference.last)
        torch.testing.assert_close(model.rows, reference.rows)


@pytest.mark.parametrize(
    ("give", "outputs", "match"),
    [
        (
            lambda m, x, e: {"loss": e.mean(), "logits": x @ x.t()},
            {},
            r"output 'logits', has shape \(batch, batch\), made at\n.*test_outputs",
        ),
        (
            lambda m, x, e: (e.mean(), x.argmax(0)),
            {},
            r"output 1, int64\[8\], made at\n(.*\n)+.*outputs=\{1: 'sum'\}",
        ),
        (
            lambda m, x, e: (e.mean(), (e > 0).sum()),
            {1: "mean"},
            r"output is int64\[\], which has no mean",
        ),
        (
            lambda m, x, e: (e.mean(), e),
            {1: "sum"},
            "has a row for each sample",
        ),
        (lambda m, x, e: e.mean(), {0: "average"}, "give 'mean', 'sum', 'max'"),
        (lambda m, x, e: (e, e.detach().max()), {}, "output 1, float32"),
    ],
)
def test_what_cannot_be_put_together(give: Any, outputs: Any, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        run(give, outputs=outputs, loss_reduction="mean")
