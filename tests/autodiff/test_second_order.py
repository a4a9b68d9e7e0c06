"""A gradient through a gradient is an error at the call, never a lost term."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules


class Critic(nn.Module):
    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.first, self.second, self.rows = nn.Linear(4, 8), nn.Linear(8, 1), rows

    def forward(self, x: Tensor) -> Tensor:
        scores = self.second(torch.tanh(self.first(x))).squeeze(1)
        return scores if self.rows else scores.mean()


def compiled(model: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend=fxsched.backend(schedules.gpipe(2, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [False, True])
def test_create_graph_is_an_error_at_the_call(rows: bool) -> None:
    torch.manual_seed(0)
    model, x = Critic(rows), torch.randn(4, 4, requires_grad=True)
    score = compiled(model)(x).mean()
    with pytest.raises(
        RuntimeError, match=r"create_graph=True .*call the model itself"
    ):
        torch.autograd.grad(score, x, create_graph=True)
    # what the error says to do, beside a plan's own gradients
    reference = copy.deepcopy(model)
    compiled(model)(x).mean().backward()
    for critic in (model, reference):
        (slope,) = torch.autograd.grad(critic(x).mean(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).pow(2).mean()
        (penalty if critic is model else penalty + critic(x).mean()).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    for found, wanted in pairs:
        torch.testing.assert_close(found.grad, wanted.grad)


@pytest.mark.slow
def test_a_gradient_inside_the_model_shows_the_line() -> None:
    class Penalty(Critic):
        def forward(self, x: Tensor) -> Tensor:
            score = super().forward(x)
            (slope,) = torch.autograd.grad(score, x, create_graph=True)
            return score + slope.pow(2).mean()

    run = compiled(Penalty(False))
    with pytest.raises(
        PlanError, match=r"autograd.grad\(score, x, create_graph=True\)"
    ):
        run(torch.randn(4, 4, requires_grad=True))
