"""What each rank of tests/runtime/test_local_rows.py does: python -m
tests.ranks_local."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxsched
from fxsched import PlanError, Schedule, schedules


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = self.last(torch.tanh(self.first(x)))
        return out if y is None else (out - y).pow(2).mean()


def train(schedule: Schedule, loss: bool) -> None:
    """Two epochs of rows that each rank loads for itself are those of whole batches."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(20, 4, generator=generator) for _ in range(2))
    model = Chain()
    reference = copy.deepcopy(model)
    backend = fxsched.backend(schedule, rows="local")
    run = torch.compile(model, backend=backend)
    sampler = fxsched.LocalSampler(range(20), schedule, 8)
    loader = DataLoader(TensorDataset(x, y), batch_sampler=sampler)
    whole = fxsched.LocalSampler(range(20), schedules.gpipe(2, 4), 8)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        whole.set_epoch(epoch)
        for (own, labels), rows in zip(loader, whole, strict=True):
            assert len(own) == len(schedule.local_rows(dist.get_rank(), 8))
            wanted = reference(x[rows], y[rows]) if loss else reference(x[rows])
            wanted.pow(2).sum().backward()
            found = run(own, labels) if loss else run(own)
            found.pow(2).sum().backward()
            torch.testing.assert_close(found, wanted)
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        if own.grad is not None:
            torch.testing.assert_close(own.grad, other.grad)
    grads = torch.tensor([float(p.grad is not None) for p in model.parameters()])
    dist.all_reduce(grads)
    assert grads.all()


def gradients_of_inputs() -> None:
    torch._dynamo.reset()
    schedule, model = schedules.ddp(2, 4), Chain()
    x = torch.randn(
        8, 4, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    model(x).pow(2).mean().backward()
    rows = schedule.local_rows(dist.get_rank(), 8)
    own = x.detach()[rows].requires_grad_()
    backend = fxsched.backend(schedule, rows="local")
    torch.compile(model, backend=backend)(own).pow(2).mean().backward()
    torch.testing.assert_close(own.grad, x.grad[rows])


def shared() -> None:
    """What all rows share is still compared."""
    torch._dynamo.reset()

    def step(x: Tensor, scale: Tensor) -> Tensor:
        return (model(x) * scale).pow(2).mean()

    model, rank = Chain(), dist.get_rank()
    options: dict[str, Any] = {"rows": "local", "batch_dims": {"scale": None}}
    backend = fxsched.backend(schedules.ddp(2, 4), **options)
    run = torch.compile(step, backend=backend)
    run(torch.randn(4, 4) + rank, torch.ones(4)).backward()
    try:
        run(torch.randn(4, 4), torch.ones(4) + rank)
    except PlanError as error:
        assert "other values of scale" in str(error), error
    else:
        raise AssertionError("scale differs between ranks")


def too_few() -> None:
    torch._dynamo.reset()
    backend = fxsched.backend(schedules.ddp(2, 4), rows="local")
    try:
        torch.compile(Chain(), backend=backend)(torch.randn(3, 4))
    except PlanError as error:
        assert "passes 3 samples for the 2 microbatches" in str(error), error
    else:
        raise AssertionError("three rows of two microbatches")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(schedules.ddp(2, 4), loss=True)
    train(schedules.fsdp(2, 4), loss=True)
    train(schedules.ddp(2, 4), loss=False)
    train(schedules.gpipe(2, 4), loss=True)
    gradients_of_inputs()
    shared()
    too_few()
    dist.destroy_process_group()
