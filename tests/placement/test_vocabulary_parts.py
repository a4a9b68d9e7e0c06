"""What shards compute of a vocabulary comes to what PyTorch computes of all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxsched.ir.shard_calls import (
    cross_entropy_of_parts,
    cross_entropy_part,
    embedding_part,
)

SHARDS, CLASSES = 4, 12


def embedded(indices: Tensor, weight: Tensor, padding: int | None = None) -> Tensor:
    parts = weight.chunk(SHARDS)
    return torch.stack(
        [embedding_part(indices, w, padding, SHARDS, p) for p, w in enumerate(parts)]
    ).sum(0)


def loss_in_parts(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    weight, smoothing = options.get("weight"), options.get("label_smoothing", 0.0)
    parts = [
        cross_entropy_part(part, labels, weight, smoothing > 0, p)
        for p, part in enumerate(logits.chunk(SHARDS, 1))
    ]
    return cross_entropy_of_parts(
        parts,
        labels,
        weight,
        CLASSES // SHARDS,
        options.get("reduction", "mean"),
        options.get("ignore_index", -100),
        smoothing,
        logits.dtype,
    )


@pytest.mark.parametrize("padding", [None, 0, 5, 11])
def test_an_embedding_is_the_sum_of_parts(padding: int | None) -> None:
    weight = torch.randn(CLASSES, 3, requires_grad=True)
    indices = torch.randint(CLASSES, (5, 7))
    wanted, found = F.embedding(indices, weight, padding), None
    found = embedded(indices, weight, padding)
    assert torch.equal(found, wanted)
    tangent = torch.randn_like(wanted)
    gradients = [torch.autograd.grad(y, weight, tangent)[0] for y in (found, wanted)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("index", [-1, CLASSES])
def test_indices_out_of_the_table_are_errors(index: int) -> None:
    with pytest.raises(IndexError):
        embedded(torch.tensor([index]), torch.randn(CLASSES, 3))


WEIGHT = torch.rand(CLASSES, generator=torch.Generator().manual_seed(0)) + 0.1


@pytest.mark.parametrize("shape", [(6,), (5, 3), (2, 3, 2)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ignore_index": 3},
        {"weight": WEIGHT},
        {"label_smoothing": 0.2},
        {"label_smoothing": 0.2, "weight": WEIGHT, "ignore_index": 3},
    ],
)
def test_a_cross_entropy_is_joined_of_parts(
    shape: tuple[int, ...], reduction: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    logits = 5 * torch.randn(shape[0], CLASSES, *shape[1:], dtype=torch.float64)
    logits.requires_grad_()
    labels = torch.randint(CLASSES, shape)
    labels.view(-1)[1::3] = options.get("ignore_index", -100)
    options = {"reduction": reduction} | options
    if "weight" in options:
        options["weight"] = options["weight"].double()
    both = (
        F.cross_entropy(logits, labels, **options),
        loss_in_parts(logits, labels, **options),
    )
    torch.testing.assert_close(*both)
    tangent = torch.randn_like(both[0])
    torch.testing.assert_close(
        *(torch.autograd.grad(y, logits, tangent)[0] for y in both)
    )


def test_classes_of_no_probability_and_large_logits_are_as_in_torch() -> None:
    logits = torch.randn(4, CLASSES)
    logits[:, 6:] = -torch.inf  # all of two shards
    logits[1] += 1e4
    logits.requires_grad_()
    labels = torch.tensor([0, 5, 2, 3])
    both = F.cross_entropy(logits, labels), loss_in_parts(logits, labels)
    torch.testing.assert_close(*both)
    torch.testing.assert_close(*(torch.autograd.grad(y, logits)[0] for y in both))


def test_a_batch_whose_labels_are_all_ignored_has_no_mean() -> None:
    labels = torch.full((4,), -100)
    assert loss_in_parts(torch.randn(4, CLASSES), labels).isnan()
    assert not loss_in_parts(torch.randn(4, CLASSES), labels, reduction="sum")


@pytest.mark.parametrize("label", [-1, CLASSES])
def test_labels_out_of_range_are_errors(label: int) -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        loss_in_parts(torch.randn(1, CLASSES), torch.tensor([label]))


def test_logits_of_16_bits_are_added_up_in_32() -> None:
    logits, labels = torch.randn(64, CLASSES).bfloat16(), torch.arange(64) % CLASSES
    parts = [
        cross_entropy_part(part, labels, None, False, p)
        for p, part in enumerate(logits.chunk(SHARDS, 1))
    ]
    assert {part.dtype for part in parts} == {torch.float32}
    found = cross_entropy_of_parts(
        parts, labels, None, CLASSES // SHARDS, "mean", -100, 0.0, torch.float32
    )
    torch.testing.assert_close(found, F.cross_entropy(logits.float(), labels))
