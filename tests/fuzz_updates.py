"""Random plans with updates, run and held against their replay in plain PyTorch.

python -m tests.fuzz_updates --plans 200 --seed 0
torchrun --nproc-per-node 2 -m tests.fuzz_updates --plans 200
Under torchrun those plans run that have as many workers as there are ranks.
"""

from __future__ import annotations

import argparse
import copy
import os
import random

import torch
import torch.distributed as dist
from torch.testing import assert_close

import fxsched
from fxsched import Direction, Placement, Schedule
from fxsched.ir.request import Transport
from tests.updates import OPTIMIZERS, TOLERANCE, batches, build_double

STAGES = 3
MOST = 4  # microbatches of an update


def random_schedule(seed: int) -> Schedule:
    """Any w and n, any number of microbatches to an update, any versions that there can
    be, u for half of them, rates and drifts for some."""
    draw = random.Random(seed)
    workers, every = draw.randint(1, 4), draw.randint(1, MOST)
    microbatches = every * draw.randint(1, 8 // every)
    numbers = [
        (s, b, d) for s in range(STAGES) for b in range(microbatches) for d in Direction
    ]
    places = {
        job: Placement(draw.randrange(workers), draw.randrange(workers))
        for job in numbers
    }
    order = {job: draw.randrange(50) for job in numbers}
    forward = {
        (s, b): max(0, b // every - draw.randint(0, 2))
        for s in range(STAGES)
        for b in range(microbatches)
    }
    newer = draw.random() < 0.3  # B on newer weights than F
    updaters = [draw.randrange(workers) for _ in range(STAGES)]
    spread, versions = draw.random() < 0.5, draw.random() < 0.8
    split = draw.random() < 0.3
    rates = [
        draw.choice((None, (draw.uniform(1, 4), draw.randint(1, 6))))
        for _ in range(STAGES)
    ]
    drifts = [
        draw.choice((None, (draw.uniform(0.5, 3), draw.uniform(0.1, 0.9))))
        for _ in range(STAGES)
    ]
    slow, drifting = draw.random() < 0.4, draw.random() < 0.4 and not spread

    def version(s: int, b: int, d: Direction) -> int:
        return b // every if newer and d in ("B", "W") else forward[s, b]

    return Schedule(
        workers,
        microbatches,
        stages=STAGES,
        w=lambda s, b, d: places[s, b, d],
        n=lambda s, b, d: order[s, b, d],
        update_every=every,
        u=(lambda s, b: updaters[s]) if spread else None,
        version=version if versions else None,
        split_backward=split,
        rate=rates.__getitem__ if slow else None,
        drift=drifts.__getitem__ if drifting else None,
        name=f"random {seed}",
    )


def check(seed: int, transport: Transport | None = "threads") -> None:
    """Two calls of a random plan end with the parameters of its replay."""
    schedule, draw = random_schedule(seed), random.Random(seed)
    model, inputs = build_double("mlp")
    inputs = tuple(torch.cat([x] * 3)[: 3 * schedule.microbatches] for x in inputs)
    made = list(OPTIMIZERS.values())[draw.randrange(len(OPTIMIZERS))]
    clip = draw.choice((None, 0.1))
    mine = copy.deepcopy(model)
    backend = fxsched.backend(
        schedule,
        transport=transport,
        order=draw.choice(("static", "dynamic")),
        prefetch=draw.randint(0, 2),
        optimizer=made(mine),
        clip_grad_norm=clip,
    )
    step = torch.compile(mine, backend=backend)
    rows = list(batches(inputs, 2))
    losses = [step(*batch).item() for batch in rows]
    assert backend.plan is not None
    wanted = fxsched.replay(backend.plan, model, made(model), rows, clip)
    assert_close(losses, wanted, **TOLERANCE)
    state, others = fxsched.full_state_dict(mine), dict(model.state_dict())
    assert_close(dict(state), others, **TOLERANCE)
    backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ranks = "TORCHELASTIC_RUN_ID" in os.environ
    if ranks:
        dist.init_process_group("gloo")
    for seed in range(options.seed, options.seed + options.plans):
        if ranks and random_schedule(seed).workers != dist.get_world_size():
            continue
        torch._dynamo.reset()
        check(seed, None if ranks else "threads")
        print(f"plan {seed}: equal to its replay", flush=True)
    if ranks:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
