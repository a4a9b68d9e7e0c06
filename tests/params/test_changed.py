"""Parameters that are changed between steps, and what backends know of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import schedules
from tests.ranks_changed import SCHEDULES
from tests.started_ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_two_ranks_go_on_with_changed_parameters_as_one_process(name: str) -> None:
    done = run_ranks(2, "tests.ranks_changed", name)
    assert done.stdout.count("changes hold") == 2, done.stdout


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.register_buffer("scale", torch.ones(4))
        self.tables = [torch.ones(4)]

    def forward(self, x: Tensor) -> Any:
        return (self.two(self.one(x)) * self.scale * self.tables[0]).square().mean()


def test_a_backend_has_a_record_of_each_tensor_by_its_first_name() -> None:
    torch._dynamo.reset()
    model = Tied()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxsched.backend(schedules.gpipe(2, 2), optimizer=sgd) as backend:
        run = torch.compile(model, backend=backend)
        run(torch.randn(4, 4))
        names = {"one.weight", "one.bias", "two.bias", "scale", "self.tables[0]"}
        assert set(backend.params) == names
        assert backend.params["one.weight"].stepped
        assert not backend.params["scale"].stepped
        model.one.bias = nn.Parameter(torch.zeros(4))
        with torch.no_grad():
            run(torch.randn(4, 4))
        assert not backend.params["one.bias"].stepped
        assert backend.params["two.bias"].stepped


class Broken(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        torch._dynamo.graph_break()
        return super().forward(x).square().mean()


def test_a_model_of_torch_export_has_its_records_too() -> None:
    torch._dynamo.reset()
    model = Broken(4, 4)
    with fxsched.compile(model, schedules.gpipe(1, 2)) as run:
        run(torch.randn(4, 4)).backward()
        assert set(run.backend.params) == {"weight", "bias"}
