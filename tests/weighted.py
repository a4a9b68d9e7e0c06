"""Models whose losses are weighted means, for tests/placement/test_weighted.py and its
ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxsched
from fxsched import Schedule

IGNORED = -100


class Words(nn.Module):
    """Predicts labels [batch, length] of words [batch, length]."""

    def __init__(self, loss: Callable[[nn.Module, Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(20, 8)
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 20)
        self.loss = loss

    def forward(self, words: Tensor, labels: Tensor) -> Any:
        hidden = torch.tanh(self.hidden(self.embed(words)))
        return self.loss(self, self.head(hidden), labels)


def batch() -> tuple[Tensor, Tensor]:
    """Words, and labels of which the later samples have fewer and fewer."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, 20, (8, 6), generator=generator)
    labels = torch.randint(0, 20, (8, 6), generator=generator)
    labels[torch.arange(6) > 6 - torch.arange(8)[:, None]] = IGNORED
    return words, labels


def mean(model: nn.Module, scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def shifted(model: nn.Module, scores: Tensor, labels: Tensor) -> Tensor:
    after = labels[:, 1:].flatten()
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), after, label_smoothing=0.1)


def masked(model: nn.Module, scores: Tensor, labels: Tensor) -> Tensor:
    keep = (labels != IGNORED).float()
    each = scores.logsumexp(-1) - scores[..., 0]
    return (each * keep).sum() / keep.sum().clamp(min=1)


def several(model: Any, scores: Tensor, labels: Tensor) -> Tensor:
    """Means of two weights, one of none, and what does not depend on the batch."""
    decay = model.head.weight.pow(2).sum() + 1.0
    other = masked(model, scores, labels) / 3
    return decay + mean(model, scores, labels) - other + scores.pow(2).mean()


def standardised(model: Any, scores: Tensor, labels: Tensor) -> Tensor:
    """Statistics of inputs over the batch."""
    target = labels.float()
    target = (target - target.mean(0)) / target.std(0)
    return (scores[..., 0] - target).pow(2).mean()


LOSSES = {
    each.__name__: each for each in (mean, shifted, masked, several, standardised)
}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def eager(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss of the whole batch in plain PyTorch, and its gradients."""
    plain = copy.deepcopy(model)
    loss = plain(*inputs)
    loss.backward()
    return loss.detach(), gradients(plain)


def planned(
    model: nn.Module, schedule: Schedule, *inputs: Tensor, **options: Any
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The same by a schedule."""
    torch._dynamo.reset()
    options = {"loss_reduction": "weighted", **options}
    step = torch.compile(model, backend=fxsched.backend(schedule, **options))
    loss = step(*inputs)
    loss.backward()
    return loss.detach(), gradients(model)
