"""Averaged replicas, held against their replay: python -m tests.ranks_averages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.testing import assert_close

import fxsched
from fxsched import Schedule, schedules
from fxsched.ir.request import Order, Transport
from tests.updates import TOLERANCE, Made, adamw, build_double, momentum


def pipelines(every: int, elastic: float | None = None) -> Schedule:
    """Two copies of a pipeline, each with two microbatches to an update."""
    inside = replace(schedules.one_f_one_b(2, 8), update_every=2)
    copies = schedules.replicate(inside, 2)
    return replace(copies, average_every=every, elastic=elastic)


def plain(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


SCHEDULES: dict[str, tuple[Callable[[], Schedule], Made]] = {
    "every 2": (lambda: schedules.local_sgd(2, 2, 8), adamw),
    "every 4": (lambda: schedules.local_sgd(2, 4, 8), momentum),
    "elastic": (lambda: schedules.local_sgd(2, 2, 8, elastic=0.4), adamw),
    "outer": (lambda: schedules.local_sgd(2, 2, 8, outer=(0.7, 0.9)), adamw),
    "outer at the end": (lambda: schedules.local_sgd(2, 4, 8, outer=(0.4, 0)), plain),
    "three": (lambda: schedules.local_sgd(3, 2, 12), momentum),
    "pipelines": (lambda: pipelines(2), adamw),
    "outer pipelines": (
        lambda: replace(pipelines(2), outer=(0.7, 0.9)),
        momentum,
    ),
    "elastic pipelines": (lambda: pipelines(2, 0.3), momentum),
}


def check(
    schedule: Schedule, made: Made, transport: Transport | None, order: Order = "static"
) -> None:
    """Twenty updates or more end with the losses, parameters and moments of the
    replay."""
    model, inputs = build_double("mlp")
    inputs = tuple(torch.cat([x] * 4)[: 2 * schedule.microbatches] for x in inputs)
    mine = copy.deepcopy(model)
    optimizer, theirs = made(mine), made(model)
    backend = fxsched.backend(
        schedule,
        transport=transport,
        order=order,
        optimizer=optimizer,
    )
    step = torch.compile(mine, backend=backend)
    assert schedule.update_every is not None
    calls = -(-20 * schedule.update_every // schedule.microbatches)
    batches = [tuple(x.roll(call, 0) for x in inputs) for call in range(calls)]
    losses = [step(*batch).item() for batch in batches]
    assert backend.plan is not None
    wanted = fxsched.replay(backend.plan, model, theirs, batches)
    assert_close(losses, wanted, **TOLERANCE)
    assert_close(fxsched.full_state_dict(mine), dict(model.state_dict()), **TOLERANCE)
    found = fxsched.full_optimizer_state_dict(mine, optimizer)["state"]
    for each in found.values():
        assert ("fxsched_outer" in each) == (schedule.outer is not None)
        each.pop("fxsched_outer", None)
    for number, state in theirs.state_dict()["state"].items():
        assert_close(found[number], state, **TOLERANCE)
    backend.close()


def main() -> None:
    for name, (make, made) in SCHEDULES.items():
        if make().workers == dist.get_world_size():
            check(make(), made, None)
            print(f"rank {dist.get_rank()}: {name} equal to the replay", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()
    dist.destroy_process_group()
