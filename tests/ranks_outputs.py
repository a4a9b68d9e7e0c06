"""What each rank of tests/runtime/test_outputs_ranks.py does: what a step gives and
leaves."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

import fxsched
from fxsched import Placement, Schedule, schedules
from tests.ranks_scalers import scalers
from tests.runtime.test_buffers import MICROBATCHES, replaced, total
from tests.runtime.test_buffers import Model as Keeping
from tests.runtime.test_training_loop import Chain, batch


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
            found, wanted = run(x), reference(x)
            torch.testing.assert_close(found["more"], wanted["more"])
            torch.testing.assert_close(model.state(), reference.state())
    print(f"rank {dist.get_rank()}: state holds")


def random() -> None:
    """Ranks that are seeded apart draw rank 0's numbers, whatever ranks run F and B."""
    elsewhere = Schedule(
        2,
        2,
        2,
        w=lambda s, b, d: Placement(s, (s + (d == "B")) % 2),
        n=lambda s, b, d: b,
    )
    for schedule, apart in ((schedules.gpipe(2, 2), 100), (elsewhere, 0)):
        found = []
        for own in ("distributed", "threads") if apart else ("distributed",):
            torch.manual_seed(0)
            model, inputs = Chain(2, dropout=0.5), batch(4)
            backend = fxsched.backend(schedule, transport=own, carry="recompute")
            run = torch.compile(copy.deepcopy(model), backend=backend)
            threads = own == "threads"
            torch.manual_seed(5 + (0 if threads else apart * dist.get_rank()))
            found.append([run(*inputs).detach()])
            torch.manual_seed(5 + (0 if threads else apart * dist.get_rank()))
            if apart == 0 and not threads:  # from here on, no rank's is another's
                torch.rand(dist.get_rank())
            found[-1] += [run(*inputs).detach(), run(*inputs).detach()]
        assert torch.equal(found[0][0], found[0][1]), found
        if apart:
            torch.testing.assert_close(found[0], found[1])
    print(f"rank {dist.get_rank()}: random numbers hold")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    scalers()
    state()
    random()
    dist.destroy_process_group()
