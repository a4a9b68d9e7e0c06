"""Batches that a collator pads to a few lengths share plans, and train as in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxsched
from fxsched import Schedule, schedules
from fxsched.models.gpt import GPT, GPTConfig

from ..bench.lengths import collate, draw

SMALL = GPTConfig(vocabulary=32, length=512, width=8, layers=2, heads=2)


def test_a_quarter_is_added_at_most() -> None:
    padded = [collate(*[torch.zeros(1, n)] * 2)[0].shape[1] for n in range(1, 513)]
    assert all(n <= found < 1.25 * n for n, found in enumerate(padded, 1))
    assert padded[32:65:8] == [40, 48, 56, 64, 80]
    assert len(set(padded[32:])) == 16


@pytest.mark.slow
def test_thirty_lengths_are_eleven_plans_of_one_graph() -> None:
    counters.clear()
    torch.manual_seed(0)
    plans = {}
    with fxsched.backend(schedules.one_f_one_b(2, 2)) as backend:
        step = torch.compile(GPT(SMALL), backend=backend, dynamic=True)
        for batch in draw(30, 33, 512, 2, 32):
            step(*collate(*batch)).backward()
            plans[id(backend.plan)] = backend.plan
    assert len(plans) <= 11
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "dynamic"),
    [(schedules.one_f_one_b(2, 2), True), (schedules.fsdp(2), None)],
)
def test_padded_batches_train_as_in_eager(schedule: Schedule, dynamic: Any) -> None:
    torch.manual_seed(0)
    model = GPT(SMALL)
    reference = copy.deepcopy(model)
    with fxsched.backend(schedule) as backend:
        step = torch.compile(model, backend=backend, dynamic=dynamic)
        sides = [
            (call, torch.optim.SGD(own.parameters(), 0.5, momentum=0.9))
            for call, own in ((step, model), (reference, reference))
        ]
        for batch in draw(3, 33, 64, 4, 32):
            losses = []
            for call, optimizer in sides:
                optimizer.zero_grad()
                loss = call(*collate(*batch))
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses)
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


class Breaks(nn.Module):
    """Dynamo breaks it; so torch.export traces it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.head(self.embed(tokens)).square().mean()


@pytest.mark.slow
def test_a_length_that_changed_is_symbolic_in_the_next_export() -> None:
    """Two traces: of the first length, and of any, also of one token."""
    torch.manual_seed(0)
    model = Breaks()
    with fxsched.compile(model, schedules.gpipe(2, 2)) as step:
        for length in (9, 12, 9, 17, 1, 2, 5):
            tokens = torch.randint(32, (4, length))
            torch.testing.assert_close(step(tokens), model(tokens))
        assert len(step._compiled.forward.traces.traces) == 2
