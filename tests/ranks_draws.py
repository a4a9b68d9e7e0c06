"""What each rank of tests/runtime/test_draws.py does: generators that go apart, one
draw."""

from __future__ import annotations

import torch
import torch.distributed as dist

import fxsched
from fxsched import schedules
from tests.drawn_models import Once, Rows, compare


def main() -> None:
    """Trains both models under three schedules."""
    rank = dist.get_rank()
    for kind in (Once, Rows):
        for make in (schedules.one_f_one_b, schedules.ddp, schedules.fsdp):
            torch._dynamo.reset()
            model = kind()
            torch.manual_seed(5)
            backend = fxsched.backend(make(2, 4))
            step = torch.compile(model, backend=backend)

            def call(*args: torch.Tensor, step: object = step) -> object:
                torch.rand(rank)  # not the same on both from here on
                return step(*args)  # type: ignore[operator]

            compare(model, call, fxsched.full_state_dict)
            backend.close()
    print(f"rank {rank}: draws hold")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
