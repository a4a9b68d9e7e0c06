"""The whole model is planned, or the call is an error: nothing runs unplanned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules


class BreaksInALoop(nn.Module):
    """Dynamo would run such a function in Python, and find no graph to hand over."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x @ self.weight
            torch._dynamo.graph_break()
        return x.mean()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_function_with_a_break_in_a_loop_is_an_error_with_its_line(
    fullgraph: bool,
) -> None:
    model = BreaksInALoop()
    backend = fxsched.backend(schedules.gpipe(2, 4), transport="threads")
    message = r"breaks at\n.*\n +torch._dynamo.graph_break[^;]*; fxsched.compile\(model"
    run = torch.compile(lambda x: model(x), backend=backend, fullgraph=fullgraph)
    with pytest.raises(PlanError, match=message):
        run(torch.ones(8, 8))


class Recurrent(nn.Module):
    """So many passes of one recurrent module, and a head."""

    def __init__(self, rows: nn.Module, passes: int = 1) -> None:
        super().__init__()
        self.rows, self.passes, self.head = rows, passes, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.passes):
            x = self.rows(x)[0]
        return self.head(x).pow(2).mean()


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 4, batch_first=True),
    "GRU": lambda: nn.GRU(4, 4, batch_first=True),
    "a child": lambda: Recurrent(nn.RNN(4, 4, 2, batch_first=True)),
    "in a loop": lambda: Recurrent(nn.LSTM(4, 4, batch_first=True), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_modules_are_planned(name: str) -> None:
    torch.manual_seed(0)
    model, x = RECURRENT[name](), torch.randn(4, 2, 4)
    eager = copy.deepcopy(model)
    losses = eager(x)
    loss_of(losses).backward()
    compiled = fxsched.compile(model, schedules.gpipe(2, 2), transport="threads")
    backend = fxsched.backend(schedules.gpipe(2, 2), transport="threads")
    for step in (compiled, torch.compile(model, backend=backend)):
        model.zero_grad()
        found = step(x)
        torch.testing.assert_close(found, losses)
        loss_of(found).backward()
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
    assert backend.plan is not None
    assert compiled.plan is not None


def loss_of(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs[0].pow(2).mean()
