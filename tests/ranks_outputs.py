"""What each rank of tests/test_outputs_ranks.py does: what a step gives and leaves."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

import fxsched
from fxsched import schedules
from tests.test_buffers import MICROBATCHES, eager, replaced, total
from tests.test_buffers import Model as Keeping


def state() -> None:
    """Every rank's model holds what eager PyTorch leaves, without more broadcasts."""
    for learn, schedule in (
        (replaced, schedules.gpipe(2, MICROBATCHES)),
        (total, schedules.ddp(2, MICROBATCHES)),
    ):
        torch.manual_seed(0)
        model = Keeping(learn)
        reference = copy.deepcopy(model)
        backend = fxsched.backend(schedule)
        run = torch.compile(model, backend=backend)
        for _ in range(2):
            x = torch.randn(8, 8)
            found, wanted = run(x), eager(reference, x)
            if isinstance(found, dict):
                torch.testing.assert_close(found["more"], wanted[-1]["more"])
            torch.testing.assert_close(model.state(), reference.state())
    print(f"rank {dist.get_rank()}: state holds")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    state()
    dist.destroy_process_group()
