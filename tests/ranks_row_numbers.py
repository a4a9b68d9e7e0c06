"""What each rank of tests/placement/test_row_numbers.py does:
python -m tests.ranks_row_numbers."""

from __future__ import annotations

import torch.distributed as dist

from fxsched import schedules
from tests.placement.test_row_numbers import train


def main() -> None:
    train("uneven graphs", schedules.one_f_one_b(2, 4))
    train("ctc of targets one after another", schedules.ddp(2, 4))
    train("writes first_row", schedules.fsdp(2, 4))
    print(f"rank {dist.get_rank()}: equal to eager", flush=True)


if __name__ == "__main__":
    main()
