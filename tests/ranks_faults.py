"""What each rank of tests/test_faults.py does: python -m tests.ranks_faults."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules


class Two(nn.Module):
    """Two layers, one a stage, with some function between them."""

    def __init__(self, between: Any = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x))).pow(2).mean()


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    options = {"stages": ["second"], **options}
    backend = fxsched.backend(schedules.gpipe(2, 2), **options)
    return torch.compile(model, backend=backend), backend


def batch(rows: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def say(name: str, text: object) -> None:
    print(f"rank {dist.get_rank()}: {name}: {text}", flush=True)


def arithmetic() -> None:
    """Ranks that compute different things say which, and where."""
    odd = dist.get_rank() == 1
    different = {
        "relu": ({}, {"between": torch.relu}),
        "reduction": ({"loss_reduction": "sum"}, {}),
        "passes": ({"passes": [lambda program, request: program]}, {}),
    }
    for name, (options, model) in different.items():
        run, _ = compiled(Two(**(model if odd else {})), **(options if odd else {}))
        try:
            run(batch())
        except PlanError as error:
            say(name, error)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    arithmetic()
    dist.destroy_process_group()
