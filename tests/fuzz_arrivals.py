"""Asynchronous parameter servers with random delays: bounds hold, replays are equal.

python -m tests.fuzz_arrivals --runs 100
torchrun --nproc-per-node 4 -m tests.fuzz_arrivals --runs 100
A run is a call whose jobs sleep as drawn, one of the workers much longer than others.
Prints how far ahead of the slowest a worker was in any, with each bound and without.

python -m tests.fuzz_arrivals --runs 0 --plans 100
Random plans whose updates are in order of arrival, each against its replay.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.testing import assert_close

import fxsched
from fxsched import Direction, Job, Placement, Schedule, schedules
from fxsched.ir.request import Transport
from fxsched.passes.users import Pass
from tests.arrivals import check as equals_replay
from tests.updates import TOLERANCE, adamw, build_double

TRAINERS, ROUNDS = 3, 6
LONG = 0.004  # seconds that a job sleeps at most
STAGES = ("layers.3",)
NAPS: dict[int, random.Random] = {}  # by worker
LENGTHS: dict[int, float] = {}


def draw_naps(run: int) -> None:
    """The delays of a run: the same, however it is bounded."""
    draw = random.Random(run)
    slow = draw.randrange(TRAINERS)
    for worker in range(TRAINERS):
        NAPS[worker] = random.Random(f"{run} of {worker}")
        LENGTHS[worker] = LONG * (1 if worker == slow else draw.random() / 4)


def nap(value: Any, worker: int) -> None:
    time.sleep(NAPS[worker].random() * LENGTHS[worker])


def sleepy(program: fx.GraphModule, request: object) -> fx.GraphModule:
    """Each job of a trainer sleeps."""
    for node in list(program.graph.nodes):
        if node.op == "call_module" and node.meta["worker"] < TRAINERS:
            with program.graph.inserting_after(node):
                program.graph.call_function(nap, (node, node.meta["worker"]))
    return program


def lead(arrivals: Sequence[Job]) -> int:
    """By how many updates of a stage a worker was ahead of the slowest, at most."""
    most = 0
    given: dict[int, Counter[int]] = {}
    for stage, b, direction in arrivals:
        if direction is Direction.UPDATE:
            counts = given.setdefault(stage, Counter(dict.fromkeys(range(TRAINERS), 0)))
            counts[b % TRAINERS] += 1
            most = max(most, max(counts.values()) - min(counts.values()))
    return most


def rows(runs: int) -> list[tuple[Tensor, ...]]:
    """A batch for each run."""
    _, inputs = build_double("mlp")
    whole = tuple(torch.cat([x] * 3)[: TRAINERS * ROUNDS] for x in inputs)
    return [tuple(x.roll(run, 0) for x in whole) for run in range(runs)]


def check(
    staleness: int | None,
    runs: int,
    over: Transport | None = None,
    slows: Pass = sleepy,
) -> list[int]:
    """The lead in each of some runs, whose replay ends with the same parameters."""
    schedule = schedules.parameter_server(
        TRAINERS + 1, TRAINERS * ROUNDS, asynchronous=True, staleness=staleness
    )
    model, _ = build_double("mlp")
    mine = copy.deepcopy(model)
    backend = fxsched.backend(
        schedule,
        STAGES,
        transport=over,
        order="dynamic",
        optimizer=adamw(mine),
        passes=[slows],
    )
    step = torch.compile(mine, backend=backend)
    arrivals, losses = [], []
    for run, batch in enumerate(rows(runs)):
        draw_naps(run)
        losses.append(step(*batch).item())
        arrivals.append(backend.arrivals)
    assert backend.plan is not None
    found = dict(fxsched.full_state_dict(mine))
    wanted = fxsched.replay(
        backend.plan, model, adamw(model), rows(runs), arrivals=arrivals
    )
    assert_close(losses, wanted, **TOLERANCE)
    assert_close(found, dict(model.state_dict()), **TOLERANCE)
    backend.close()
    return [lead(each) for each in arrivals]


def random_schedule(seed: int) -> Schedule:
    """Any w with one worker that keeps each stage, and any n; microbatches in turns."""
    draw = random.Random(seed)
    workers, turns = draw.randint(1, 4), draw.randint(1, 3)
    keepers = [draw.randrange(workers) for _ in range(3)]
    places = {
        (s, turn, d): draw.randrange(workers)
        for s in range(3)
        for turn in range(turns)
        for d in Direction
    }
    order = {(s, d): draw.randrange(50) for s in range(3) for d in Direction}
    return Schedule(
        workers,
        turns * draw.randint(1, 4),
        stages=3,
        w=lambda s, b, d: Placement(keepers[s], places[s, b % turns, d]),
        n=lambda s, b, d: order[s, d] + 10 * b,
        in_flight=draw.choice((None, 2)),
        split_backward=draw.random() < 0.3,
        update_every=1,
        version=lambda s, b, d: max(0, b + 1 - turns),
        ahead=draw.choice((2 * turns, inf)),
        name=f"random {seed}",
    )


def check_plan(seed: int) -> None:
    """Some calls of a random plan end with the parameters of their replay."""
    draw = random.Random(seed)
    equals_replay(
        random_schedule(seed),
        draw.choice(("mlp", "gpt")),
        prefetch=draw.randint(0, 2),
        clip_grad_norm=draw.choice((None, 0.1)),
        carry=draw.choice(("saved", "recompute")),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--plans", type=int, default=0)
    options = parser.parse_args()
    for seed in range(options.plans):
        torch._dynamo.reset()
        check_plan(seed)
        print(f"plan {seed}: equal to its replay", flush=True)
    ranks = "TORCHELASTIC_RUN_ID" in os.environ
    if ranks:
        dist.init_process_group("gloo")
    for staleness in (None, 1, 2, 3) if options.runs else ():
        torch._dynamo.reset()
        leads = check(staleness, options.runs, over=None if ranks else "threads")
        if not ranks or not dist.get_rank():
            print(
                f"staleness {staleness}: {len(leads)} runs equal their replay; ahead "
                f"{max(leads)} at most, more than 3 in {sum(x > 3 for x in leads)}",
                flush=True,
            )
        assert staleness is None or max(leads) <= staleness, leads
    if ranks:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
