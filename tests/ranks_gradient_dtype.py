"""Gradients added up in float32 beside plain PyTorch; as a program, on two ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxsched
from fxsched import Schedule, schedules

MICROBATCHES = 8
Gradients = dict[str, Tensor]


class Tied(nn.Module):
    """An embedding that is read twice, and a norm that may be float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.norm, self.second = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.relu(self.first(self.embed(x)))
        hidden = self.norm(hidden.to(self.norm.weight.dtype))
        hidden = self.second(hidden.to(self.second.weight.dtype))
        logits = (hidden @ self.embed.weight.T).to(
            torch.promote_types(hidden.dtype, torch.float32)
        )
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def model() -> tuple[nn.Module, Tensor, Tensor]:
    """A model of bfloat16 parameters, and its inputs."""
    torch.manual_seed(0)
    words = torch.randint(0, 20, (2, 16, 4))
    return Tied().bfloat16(), words[0], words[1]


def one_by_one(model: nn.Module, x: Tensor, y: Tensor, dtype: torch.dtype) -> Gradients:
    """Plain PyTorch: each microbatch's gradients added up in a type, and cast once."""
    model, sums = copy.deepcopy(model), Gradients()
    pairs = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
    for part in pairs:
        (model(*part) / MICROBATCHES).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            if name in sums:
                sums[name] += parameter.grad
            else:
                sums[name] = parameter.grad.to(dtype, copy=True)
            parameter.grad = None
    return {n: sums[n].to(p.dtype) for n, p in model.named_parameters()}


def planned(
    model: nn.Module, schedule: Schedule, x: Tensor, y: Tensor, **options: Any
) -> Gradients:
    """The same by a plan."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    with fxsched.backend(schedule, deterministic=True, **options) as backend:
        torch.compile(model, backend=backend)(x, y).backward()
    named = model.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}


def compare(schedule: Schedule, dtype: torch.dtype, **options: Any) -> None:
    """Raises AssertionError for gradients with other bits than plain PyTorch's."""
    trained, x, y = model()
    trained.get_submodule("norm").float()
    wanted = one_by_one(trained, x, y, dtype)
    found = planned(trained, schedule, x, y, gradient_dtype=dtype, **options)
    assert found, "this process has some of the weights"
    for name, value in found.items():
        assert value.dtype == wanted[name].dtype
        assert torch.equal(value, wanted[name]), f"{name} has other bits"


def main() -> None:
    dist.init_process_group("gloo")
    compare(schedules.fsdp(2, 8), torch.float32, transport="distributed")
    if dist.get_rank() == 0:
        print("ranks have the bits of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
