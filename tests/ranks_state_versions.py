"""Each rank of tests/test_state_versions.py: python -m tests.ranks_state_versions."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.state_models import STATEFUL
from tests.test_state_versions import SCHEDULES, check

ON_RANKS = {
    "1f1b": ("centre", "queue", "ema", "counters"),
    "ddp": ("centre", "codebook", "ema", "instances"),
    "fsdp": ("bank", "unread", "ema", "through"),
}


def main() -> None:
    for schedule, kinds in ON_RANKS.items():
        for kind in kinds:
            torch.manual_seed(0)
            check(STATEFUL[kind](), SCHEDULES[schedule](2))
            print(f"rank {dist.get_rank()}: {schedule}, {kind}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()
    dist.destroy_process_group()
