"""Each rank of tests/placement/test_placements.py: python -m tests.ranks_placements."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fxsched
from fxsched import Schedule, schedules
from tests.placed_operators import LENGTH, attention, by_operator
from tests.placement.test_placements import Llama


def train(model: Llama, schedule: Schedule) -> None:
    """Three steps of a Llama with an attention of its own: parameters are eager's."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    eager, ids = copy.deepcopy(model), torch.randint(24, (8, LENGTH))
    with fxsched.backend(schedule) as backend:
        step = torch.compile(model, backend=backend)
        both = [torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (model, eager)]
        for _ in range(3):
            losses = step(ids), eager(ids)
            torch.testing.assert_close(*losses)
            for loss, optimizer in zip(losses, both, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert "meet" not in backend.plan.explain()
    state = fxsched.full_state_dict(model)
    for key, value in eager.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6)


def main() -> None:
    ALL_ATTENTION_FUNCTIONS.register("operator", by_operator)
    fxsched.placements(attention, forward={(Shard(0),) * 3: Shard(0)})
    torch.manual_seed(0)
    model = Llama("operator")
    for schedule in (
        schedules.one_f_one_b(2, 4),
        schedules.ddp(2, 4),
        schedules.fsdp(2, 4),
    ):
        train(model, schedule)
    print(f"rank {dist.get_rank()}: equal to eager", flush=True)


if __name__ == "__main__":
    main()
