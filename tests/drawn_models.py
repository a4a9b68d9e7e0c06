"""Models that draw, and a training of theirs whose numbers eager PyTorch is given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 3


class Drawing(nn.Module):
    """Two layers; `forward` gives the loss and what was drawn, or is given that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)


class Once(Drawing):
    """One draw for all rows: mixup's weight, a masked span, a kept branch, a mask of
    weights, noise; beside dropout, which each row has its own of."""

    def forward(self, x: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        lam, start, keep, mask, noise, dropped = drawn or (
            torch.distributions.Beta(0.4, 0.4).sample(),
            torch.randint(0, 7, (1,)),
            (torch.rand(()) < 0.5).float(),
            F.dropout(torch.ones(8, 8), 0.3),
            torch.randn(8),
            F.dropout(torch.ones_like(x), 0.3),
        )
        place = torch.arange(8)
        x = x.masked_fill((place >= start) & (place < start + 2), 0.0) * lam
        hidden = torch.tanh(F.linear(x, self.first.weight * mask, self.first.bias))
        hidden = hidden * dropped + keep * torch.sin(hidden) + noise
        loss = (self.last(hidden) - x).square().mean()
        return loss, lam, start, keep, mask, noise, dropped


class Rows(Drawing):
    """Draws among the rows of the batch, and one for all that joint operations read."""

    def forward(self, x: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        hidden, every = torch.tanh(self.first(x)), torch.ones(len(x))
        lam, order, four, each, some = drawn or (
            torch.rand(()),
            torch.randperm(len(x)),
            torch.randint(0, len(x), (4,)),
            torch.randint(len(x), (len(x),)),
            torch.multinomial(every, 3),
        )
        mixed = lam * hidden + (1 - lam) * hidden[order]
        mixed = mixed - hidden[four].mean(0) * hidden[each] + hidden[some].sum(0)
        return (self.last(mixed) - x).square().mean(), lam, order, four, each, some


def train(
    model: nn.Module,
    call: Callable[..., Any],
    numbers: list[tuple[Tensor, ...]] | None = None,
) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
    """Losses of three steps with momentum, and all that was drawn.

    numbers: what is drawn, or None to draw.
    """
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    left, all_drawn = [], []
    for step in range(STEPS):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        loss, *drawn = call(x, *(numbers[step] if numbers else ()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        left.append(loss.detach())
        all_drawn.append(tuple(each.detach().clone() for each in drawn))
    return left, all_drawn


def compare(
    model: nn.Module, step: Callable[..., Any], full: Callable[[nn.Module], Any]
) -> list[tuple[Tensor, ...]]:
    """Trains both; raises where eager PyTorch, with the plan's numbers, differs. Gives
    these.

    full: the state of a model that was trained by the plan.
    """
    eager = copy.deepcopy(model)
    found, numbers = train(model, step)
    wanted, _ = train(eager, eager, numbers)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(dict(full(model)), dict(eager.state_dict()))
    return numbers
