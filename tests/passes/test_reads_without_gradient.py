"""Weights that a stage reads without a gradient: their update doesn't change them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fxsched
from fxsched import Direction, Schedule, schedules

FORWARD = Direction.FORWARD


class Score(nn.Module):
    """Takes a while, in which an update could go on."""

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        for _ in range(40):
            hidden = torch.tanh(hidden @ table.T) @ table
        return hidden


class Nearest(nn.Module):
    """Layers after an embedding, whose table scores what comes of them, detached."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.table, self.score, self.early = nn.Embedding(64, 16), Score(), early
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [batch, 4] -> the loss, and scores [batch, 4, 16]."""
        table = self.table.weight.detach() if self.early else None  # in the first stage
        hidden = self.table(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        loss = hidden.pow(2).mean()
        with torch.no_grad():
            table = self.table.weight if table is None else table
            return loss, self.score(hidden, table)


def late(schedule: Schedule) -> Schedule:
    """F of a last stage without a B come after all else on their worker."""

    def n(s: int, b: int, d: Direction) -> int:
        return b + 100 * (s == 3 and d is FORWARD) + s - 10 * (d is not FORWARD)

    return replace(schedule, n=n)


SCHEDULES = {
    "1f1b": schedules.one_f_one_b(4, 4),
    "zb_v": schedules.zb_v(2, 4),
    "ddp": late(schedules.ddp(2, 4)),
    "zero2": late(schedules.zero2(2, 4)),
    "fsdp": late(schedules.fsdp(2, 4)),
    "twice": replace(late(schedules.ddp(2, 4)), update_every=2, u=lambda s, b: s % 2),
}


CUT = ["layers.1", "layers.2", "score"]
CASES = [(name, False, order) for name in SCHEDULES for order in ("static", "dynamic")]
CASES += [("ddp", True, "static"), ("fsdp", True, "static"), ("1f1b", True, "dynamic")]


@pytest.mark.parametrize(("name", "early", "order"), CASES)
def test_a_read_without_a_gradient_is_of_the_weights_before_the_update(
    name: str, early: bool, order: Any
) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    schedule, model = SCHEDULES[name], Nearest(early).double()
    eager = copy.deepcopy(model)
    mine, other = (torch.optim.SGD(m.parameters(), 0.5) for m in (model, eager))
    stages: Any = "auto" if name == "zb_v" else CUT
    backend = fxsched.backend(schedule, optimizer=mine, order=order, stages=stages)
    step = torch.compile(model, backend=backend)
    for _ in range(3):
        x = torch.randint(0, 64, (8, 4))
        _, found = step(x)
        wanted = []
        for part in x.chunk(4 // (schedule.update_every or 4)):
            loss, scores = eager(part)
            wanted.append(scores)
            loss.backward()
            other.step()
            other.zero_grad()
        assert_close(found, torch.cat(wanted))
    assert_close(model.state_dict(), eager.state_dict())
