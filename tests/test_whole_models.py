"""Dynamo traces the whole model, or the call is an error: nothing runs unplanned."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules


class BreaksInALoop(nn.Module):
    """Dynamo runs such a function in Python, where it finds no graph to hand over."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x @ self.weight
            torch._dynamo.graph_break()
        return x.mean()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_break_in_a_loop_is_an_error_with_its_line(fullgraph: bool) -> None:
    backend = fxsched.backend(schedules.gpipe(2, 4), transport="threads")
    run = torch.compile(BreaksInALoop(), backend=backend, fullgraph=fullgraph)
    with pytest.raises(PlanError, match=r"breaks at\n.*\n +torch._dynamo.graph_break"):
        run(torch.ones(8, 8))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rows = kind(8, 8, 2, batch_first=True)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x)[0]).pow(2).mean()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_are_planned(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model, x = Recurrent(kind), torch.randn(8, 3, 8)
    reference = copy.deepcopy(model)
    backend = fxsched.backend(schedules.gpipe(2, 4), transport="threads")
    loss, wanted = torch.compile(model, backend=backend)(x), reference(x)
    loss.backward()
    wanted.backward()
    assert backend.plan is not None
    torch.testing.assert_close(loss, wanted)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
