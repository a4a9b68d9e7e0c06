"""What each rank of tests/passes/test_arrivals.py does: python -m
tests.ranks_arrivals."""

from __future__ import annotations

import torch.distributed as dist

from fxsched import schedules
from tests.arrivals import check


def main() -> None:
    for servers, staleness in ((1, None), (2, 1)):
        schedule = schedules.parameter_server(
            4, 6, servers, asynchronous=True, staleness=staleness
        )
        check(schedule, transport=None, stages=["layers.3"], clip_grad_norm=0.1)
        print(f"rank {dist.get_rank()}: {servers} servers, equal to the replay")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()
    dist.destroy_process_group()
