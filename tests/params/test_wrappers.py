"""Models that others share out over ranks already are refused, whichever way round."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import fxsched
from fxsched import PlanError, schedules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).pow(2).mean()


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    backend = fxsched.backend(schedules.gpipe(2, 2), transport="threads")
    return torch.compile(model, backend=backend)


def inside(model: Net) -> Net:
    model.layer = DistributedDataParallel(model.layer)  # type: ignore[assignment]
    return model


def method(model: Net) -> nn.Module:
    model.compile(backend=fxsched.backend(schedules.gpipe(2, 2), transport="threads"))
    return DistributedDataParallel(model)


WAYS: dict[str, tuple[Callable[[Net], Callable[[Tensor], Tensor]], str]] = {
    "DDP": (
        lambda net: compiled(DistributedDataParallel(net)),
        "the model is wrapped in DistributedDataParallel; give torch.compile the model",
    ),
    "a part": (
        lambda net: compiled(inside(net)),
        "the model's layer is wrapped in DistributedDataParallel",
    ),
    "FSDP2": (
        lambda net: compiled(fully_shard(net)),
        "the model is wrapped in fully_shard; give torch.compile the model as it is",
    ),
    "DataParallel": (
        lambda net: compiled(DataParallel(net)),
        "the model is wrapped in DataParallel",
    ),
    "around": (
        lambda net: DistributedDataParallel(compiled(net)),
        "the compiled model is called by DistributedDataParallel, which would average",
    ),
    "around compile()": (method, "call the compiled model itself: replicas, shards"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_is_shared_out_already_is_an_error(way: str) -> None:
    wrapped, text = WAYS[way]
    with pytest.raises(PlanError, match=text):
        wrapped(Net())(torch.ones(4, 4))
