"""What each rank of tests/passes/test_versions.py does: python -m tests.ranks_versions.

On 2 ranks or 4, the stale schedules of as many workers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

import fxsched
from fxsched import Plan, Schedule, schedules
from tests.fuzz_updates import check, random_schedule
from tests.updates import TOLERANCE, adamw, build_double


def late(schedule: Schedule, every: int) -> Schedule:
    """Any schedule, one update late."""
    return replace(
        schedule, update_every=every, version=lambda s, b, d: max(0, b // every - 1)
    )


SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "pipedream": lambda: schedules.pipedream(4, 8),
    "pipedream_2bw": lambda: schedules.pipedream_2bw(4, 8),
    "stale_by_one": lambda: schedules.stale_by_one(2, 8),
    "pipemare": lambda: schedules.pipemare(4, 8, annealed=12),
    "pipemare of 2": lambda: schedules.pipemare(2, 8, annealed=12, every=2),
    "ddp": lambda: late(schedules.ddp(4, 8), 4),
    "fsdp": lambda: late(schedules.fsdp(2, 8), 2),
    "owners": lambda: replace(late(schedules.ddp(2, 8), 2), u=lambda s, b: s % 2),
}


RANDOM = [seed for seed in range(20) if random_schedule(seed).workers == 2][:3]


def rows(inputs: tuple[Tensor, ...], schedule: Schedule) -> list[tuple[Tensor, ...]]:
    """Batches for twenty updates or more."""
    assert schedule.update_every is not None
    updates = schedule.microbatches // schedule.update_every
    calls = -(-20 // updates)
    return [tuple(x.roll(call, 0) for x in inputs) for call in range(calls)]


def replayed(
    plan: Plan, model: nn.Module, batches: list[tuple[Tensor, ...]]
) -> list[float]:
    return fxsched.replay(plan, model, adamw(model), batches)


PIPELINES = ("pipedream", "pipedream_2bw", "stale_by_one", "pipemare")


def pipeline(name: str, workers: int) -> Schedule:
    options = {"annealed": 12} if name == "pipemare" else {}
    return schedules.LIBRARY[name](workers, 8, **options)


def held_to_replay(name: str, schedule: Schedule) -> None:
    model, inputs = build_double("mlp")
    mine = copy.deepcopy(model)
    backend = fxsched.backend(schedule, optimizer=adamw(mine))
    step = torch.compile(mine, backend=backend)
    batches = rows(inputs, schedule)
    losses = [step(*batch).item() for batch in batches]
    assert backend.plan is not None
    assert_close(losses, replayed(backend.plan, model, batches), **TOLERANCE)
    wanted = dict(model.state_dict())
    assert_close(fxsched.full_state_dict(mine), wanted, **TOLERANCE)
    backend.close()


def resume() -> None:
    """A schedule with velocities goes on in another model and optimizer, which load the
    state of all ranks."""
    model, inputs = build_double("mlp")
    schedule = pipeline("pipemare", dist.get_world_size())
    batches = rows(inputs, schedule)
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    optimizers = adamw(first), adamw(second)
    for mine, optimizer, half in (
        (first, optimizers[0], batches[:1]),
        (second, optimizers[1], batches[1:]),
    ):
        if mine is second:
            fxsched.load_full_state_dict(mine, fxsched.full_state_dict(first))
            state = fxsched.full_optimizer_state_dict(first, optimizers[0])
            counts = {each["fxsched_updates"] for each in state["state"].values()}
            assert counts == {8}, counts
            fxsched.load_full_optimizer_state_dict(mine, optimizer, state)
        backend = fxsched.backend(schedule, optimizer=optimizer)
        step = torch.compile(mine, backend=backend)
        for batch in half:
            step(*batch)
        assert backend.plan is not None
        plan = backend.plan
    replayed(plan, model, batches)
    wanted = dict(model.state_dict())
    assert_close(fxsched.full_state_dict(second), wanted, **TOLERANCE)


def main() -> None:
    workers, rank = dist.get_world_size(), dist.get_rank()
    for name in PIPELINES:
        held_to_replay(name, pipeline(name, workers))
        print(f"rank {rank}: {name} equal to the replay", flush=True)
    resume()
    print(f"rank {rank}: resumed, equal to the replay", flush=True)
    for name in ("fsdp", "owners") if workers == 2 else ():
        held_to_replay(name, SCHEDULES[name]())
        print(f"rank {rank}: {name} equal to the replay", flush=True)
    for seed in RANDOM if workers == 2 else ():
        check(seed, None)
        print(f"rank {rank}: {seed} equal to the replay", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()
    dist.destroy_process_group()
