"""Sums in pieces between ranks: equal to eager's, and the same bits on all of them.

torchrun --nproc-per-node 4 -m tests.ranks_sums (tests/transport/test_torchrun.py)
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import fxsched
from fxsched import schedules
from fxsched.ir import ops

from .passes.test_sums_in_pieces import Net, X


def check(transport: str) -> None:
    model, eager = Net(), Net()
    backend = fxsched.backend(
        schedules.ddp(4, 8), transport=transport, sums="pieces", timeout=60
    )
    step = torch.compile(model, backend=backend)
    for _ in range(3):
        model.zero_grad()
        step(X).backward()
    eager(X).backward()
    assert any(op.target is ops.join for op in backend.plan.step.ops)
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
        assert mine.grad is not None
        every = [torch.empty_like(mine.grad) for _ in range(4)]
        dist.all_gather(every, mine.grad.contiguous())
        assert all(torch.equal(each, every[0]) for each in every)
    backend.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for transport in ("gloo", "distributed"):
        check(transport)
    dist.destroy_process_group()
