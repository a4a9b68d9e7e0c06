"""Autocast and bfloat16 parameters equal eager PyTorch with the same casts."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import schedules

ULP = 2**-7  # of bfloat16, at most, relative to a value


class Model(nn.Module):
    """Two layers; autocast around what it does, where it is inside."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.inside = inside

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.inside):
            hidden = self.b(torch.relu(self.a(x)))
        hidden = self.norm(hidden.to(self.norm.weight.dtype))
        return nn.functional.mse_loss(hidden.float(), y)


def gradients(
    model: nn.Module, step: nn.Module, autocast: bool, parts: int
) -> list[Tensor]:
    torch.manual_seed(0)
    dtype = model.a.weight.dtype
    x, y = torch.randn(8, 8).to(dtype), torch.randn(8, 8)
    around = torch.autocast("cpu", torch.bfloat16) if autocast else None
    with around or contextlib.nullcontext():
        for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (step(*part) / parts).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("casts", ["inside", "around", "parameters"])
def test_casts_are_eagers(casts: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(casts == "inside")
    if casts == "parameters":
        model.bfloat16()
    wanted = gradients(eager := copy.deepcopy(model), eager, casts == "around", 4)
    schedule = schedules.one_f_one_b(2, 4)
    with fxsched.backend(schedule, deterministic=True) as backend:
        step = torch.compile(model, backend=backend)
        found = gradients(model, step, casts == "around", 1)
    assert [g.dtype for g in found] == [p.dtype for p in model.parameters()]
    torch.testing.assert_close(found, wanted, rtol=ULP, atol=0)


@pytest.mark.parametrize(
    "schedule", [schedules.one_f_one_b(2, 4), schedules.ddp(2, 4)], ids=["1f1b", "ddp"]
)
def test_bits_are_those_of_as_many_intra_op_threads(schedule: fxsched.Schedule) -> None:
    """LayerNorm's gradients depend on how many threads add them up."""
    torch.manual_seed(0)
    layers = nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU()
    model = nn.Sequential(*layers, nn.Linear(256, 9))
    x, before = torch.randn(16, 33, 64), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for rows in x.chunk(4):
            (model(rows).square().mean() / 4).backward()
        wanted = [each.grad.clone() for each in model.parameters()]
        model.zero_grad()
        with fxsched.backend(schedule, deterministic=True) as backend:
            torch.compile(model, backend=backend)(x).square().mean().backward()
    finally:
        torch.set_num_threads(before)
    for one, each in zip(wanted, model.parameters(), strict=True):
        assert torch.equal(one, each.grad)
