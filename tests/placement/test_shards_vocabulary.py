"""Vocabularies in shards are the model: embeddings, heads and losses of labels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, Schedule, schedules

WORDS = {"embed": "row", "head": "column"}
CLASSES = 12


class Words(nn.Module):
    """An embedding, a layer and a head, which may share its weight; the mean over the
    labels that aren't -100, and the logits if they are wanted."""

    def __init__(
        self, classes: int = CLASSES, width: int = 8, tied: bool = False, **loss: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(classes, width, padding_idx=1)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, classes, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.loss = loss
        self.returned = False

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.mix(self.embed(tokens)).tanh())
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **self.loss)
        return (loss, logits) if self.returned else loss


def batch(classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    """Of which the first microbatch of two has no labels."""
    torch.manual_seed(1)
    tokens, labels = torch.randint(classes, (4, 6)), torch.randint(classes, (4, 6))
    labels[:2] = labels[2, ::2] = -100
    return tokens, labels


def in_shards(shards: int = 2) -> Schedule:
    return schedules.sharded(schedules.gpipe(1, 2), shards)


def assert_trains(model: Words, schedule: Schedule, **options: Any) -> None:
    """Losses and parameters over three steps are eager's of the whole batch."""
    eager, inputs = copy.deepcopy(model), batch(model.embed.num_embeddings)
    run = torch.compile(model, backend=fxsched.backend(schedule, **options))
    both = []
    for each, call in ((eager, eager), (model, run)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            result = call(*inputs)
            loss = result[0] if each.returned else result
            loss.backward()
            found += [*(result if each.returned else [loss])]
            optimizer.step()
        both.append([*found, *each.parameters()])
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shards"),
    [
        (Words(), 4),
        (Words(tied=True, label_smoothing=0.1), 2),
    ],
    ids=["apart", "tied"],
)
def test_a_named_vocabulary_equals_eager(model: Words, shards: int) -> None:
    assert_trains(model, in_shards(shards), shards=WORDS)


@pytest.mark.slow
def test_logits_that_are_returned_are_whole() -> None:
    model = Words()
    model.returned = True
    assert_trains(model, in_shards(), shards=WORDS)


@pytest.mark.slow
def test_a_vocabulary_goes_with_autocast() -> None:
    model, inputs = Words(), batch()
    eager = copy.deepcopy(model)
    run = torch.compile(model, backend=fxsched.backend(in_shards(), shards=WORDS))
    both = []
    for call in (run, eager):
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(*inputs)
        loss.backward()
        both.append(loss)
    torch.testing.assert_close(*both, rtol=1e-3, atol=0)
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=3e-2, atol=3e-3)


@pytest.mark.slow
def test_auto_cuts_a_vocabulary_where_that_is_faster() -> None:
    for classes, width, how in (
        (4096, 64, "column"),
        (CLASSES, 8, "whole: cutting it makes the step slower"),
    ):
        model = Words(classes, width)
        text = fxsched.plan(model, in_shards(), *batch(classes)).explain()
        (row,) = (line for line in text.splitlines() if line.startswith("head"))
        assert row.endswith(how)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            Words(tied=True),
            {"shards": {"embed": "row", "head": "row"}},
            r"embed.weight is also cut by another name in shards=, as 'column' for li",
        ),
        (
            Words(),
            {"shards": {"head": "column"}, "encode": {"activations": torch.bfloat16}},
            "would round numbers that cross_entropy_loss in the model reads",
        ),
        (Words(11), {"shards": WORDS}, "its shape is 11 x 8, and no row dimension"),
    ],
    ids=["words", "rounded", "divides"],
)
def test_what_a_vocabulary_does_not_go_with_is_said(
    model: Words, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message) as error:
        fxsched.plan(model, in_shards(), *batch(model.embed.num_embeddings), **options)
    assert "\n  at " in str(error.value)
