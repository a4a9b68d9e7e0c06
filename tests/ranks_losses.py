"""What each rank of tests/placement/test_weighted.py does:
python -m tests.ranks_losses."""

from __future__ import annotations

import torch.distributed as dist
from torch.testing import assert_close

from fxsched import schedules
from tests.weighted import LOSSES, Words, batch, eager, planned


def main() -> None:
    made = {"gpipe": schedules.gpipe(2, 4), "fsdp": schedules.fsdp(2)}
    for name, schedule in made.items():
        wanted_loss, wanted = eager(Words(LOSSES["several"]), *batch())
        model = Words(LOSSES["several"])
        loss, gradients = planned(model, schedule, *batch(), stages=["head"])
        assert_close(loss, wanted_loss)
        own = {key: g for key, g in gradients.items() if g is not None}
        assert own
        assert_close(own, {key: wanted[key] for key in own})
        print(f"rank {dist.get_rank()}: {name} equal to eager", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()
    dist.destroy_process_group()
