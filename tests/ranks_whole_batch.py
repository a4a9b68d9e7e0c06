"""What each rank of tests/placement/test_whole_batch.py does:
python -m tests.ranks_whole_batch."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.testing import assert_close

import fxsched
from fxsched import PlanError, schedules
from fxsched.ir.request import Pairs
from tests.placement.test_whole_batch import (
    MIXES,
    Mixed,
    Sigmoid,
    Towers,
    Twisted,
    batch,
)


def train(
    model: torch.nn.Module, schedule: fxsched.Schedule, pairs: Pairs = "auto"
) -> None:
    """Three steps of AdamW, parameters as eager's on the whole batch."""
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    step = torch.compile(model, backend=fxsched.backend(schedule, pairs=pairs))
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, eager)]
    for _ in range(3):
        losses = step(*batch()), eager(*batch())
        assert_close(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    state = fxsched.full_state_dict(model)
    for key, value in eager.state_dict().items():
        assert_close(state[key], value, atol=1e-5, rtol=1e-4)


def local() -> None:
    """Each rank has its own rows; what others have comes as messages, or not at all."""
    schedule = schedules.ddp(2, 4)
    rows = schedule.local_rows(dist.get_rank(), 8)
    own = [value[rows] for value in batch()]
    model = Towers()
    step = torch.compile(model, backend=fxsched.backend(schedule, rows="local"))
    assert_close(step(*own), model(*batch()))
    step = torch.compile(Twisted(), backend=fxsched.backend(schedule, rows="local"))
    try:
        step(*own)
    except PlanError as error:
        print(f"rank {dist.get_rank()}: refused, {error}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    for schedule in (schedules.one_f_one_b(2, 4), schedules.fsdp(2, 4)):
        train(Towers(), schedule)
        train(Mixed(MIXES["pairs"]), schedule)
        print(f"rank {dist.get_rank()}: equal to eager", flush=True)
    for schedule in (schedules.ddp(2, 4), schedules.graph(2, 4)):
        train(Sigmoid(), schedule, "spread")
        print(f"rank {dist.get_rank()}: spread, equal to eager", flush=True)
    local()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()
    dist.destroy_process_group()
