"""Each rank of tests/params/test_state_versions.py: python -m
tests.ranks_state_versions."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.testing import assert_close

import fxsched
from tests.params.test_state_versions import SCHEDULES, train
from tests.state_models import STATEFUL

ON_RANKS = {
    "1f1b": ("centre", "queue", "ema", "counters"),
    "ddp": ("centre", "codebook", "ema", "instances"),
    "fsdp": ("bank", "unread", "ema", "through"),
}


def main() -> None:
    for schedule, kinds in ON_RANKS.items():
        for kind in kinds:
            torch.manual_seed(0)
            model = STATEFUL[kind]()
            eager = copy.deepcopy(model)
            torch._dynamo.reset()
            step = torch.compile(model, backend=fxsched.backend(SCHEDULES[schedule](2)))
            wanted = train(eager, eager)
            assert_close(train(step, model), wanted, rtol=1e-4, atol=1e-5)
            print(f"rank {dist.get_rank()}: {schedule}, {kind}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()
    dist.destroy_process_group()
