"""Steps under limits of memory: planned, and measured in turns.

A limit is a share of the most bytes that a rank of 1f1b holds without one. --parked:
1f1b without a limit, whose activations wait on disk, or on the last ranks (BPipe).
--model: a GPT of the given size, or one of tests/encoders.py. Ratios are to 1f1b
without a limit, whose plan is made of the same profile. Bytes are those of the rank
with the most: `held` has weights and the optimizer's state as planned, the rest as it
was. With --transport gloo no memory is shared, so that all of it is counted as it is.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

import fxsched
from fxsched import schedules

from ..allocated import most_held
from .measure import slowest
from .predict import Racer, made, race


def run(options: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model, batch = made(options)
    count, world = options.microbatches, dist.get_world_size()
    given: dict[str, Any] = {
        "transport": options.transport,
        "profile": fxsched.profile(model, *batch, microbatches=count),
    }
    most = float("nan")
    first = schedules.one_f_one_b(world, count)
    asked: list[tuple[str, fxsched.Schedule, float | None]] = [("1f1b", first, None)]
    asked += [
        (f"1f1b, parked: {place}", schedules.parked(first, PARKED[place](world)), None)
        for place in options.parked
    ]
    asked += [
        (f"{name}, {share:.0%}", schedules.LIBRARY[name](world, count), share)
        for share in options.shares
        for name in options.schedules
    ]
    racers: list[Racer] = []
    rows: dict[str, list[Any]] = {}
    for title, schedule, share in asked:
        limit = None if share is None else share * most
        model, batch = made(options)
        backend = fxsched.backend(schedule, memory_limit=limit, **given)
        racer = Racer(title, model, backend, batch)
        try:
            racer.step(*batch).backward()
        except fxsched.PlanError as refused:
            rows[title] = [title, str(refused)]
        else:
            racers.append(racer)
            rows[title] = []
            most = _most(racers[0].plan)
    race(racers, options.steps)
    steps = [
        (r.plan.simulate().latency, statistics.median(slowest(r.seconds).tolist()))
        for r in racers
    ]
    for racer, step in zip(racers, steps, strict=True):
        here = racer.plan.memory[dist.get_rank()].at_once
        stays = here.weights + here.state
        held = stays + most_held(racer.step, racer.model, racer.batch)
        (held,) = slowest([held]).tolist()
        ratios = [now / first for now, first in zip(step, steps[0], strict=True)]
        bytes_ = [_most(racer.plan) / most, held / most]
        rows[racer.name] = [racer.name, *bytes_, *ratios]
    if not dist.get_rank():
        print(f"1f1b: {most / 2**20:.1f} MiB, a step of {1e3 * steps[0][1]:.0f} ms")
        headers = ("schedule, limit", "planned", "held", "predicted", "measured")
        table = [row for row in rows.values() if len(row) > 2]
        print(tabulate(table, headers, floatfmt=".3f"))
        for title, text in (row for row in rows.values() if len(row) == 2):
            print(f"{title}: {text}")
    dist.destroy_process_group()
    return 0


def _on_the_last_ranks(world: int) -> Callable[[int, int], int | None]:
    """Where activations of a stage and a microbatch of 1f1b wait: so many of the first
    half of the ranks, each on one of the last, that all hold about as many."""

    def where(s: int, b: int) -> int | None:
        share = (world - 1 - 2 * s) / 2 / (world - s) + 0.04
        parks = s < world // 2 and int((b + 1) * share) > int(b * share)
        return world - 1 - s if parks else None

    return where


PARKED: dict[str, Callable[[int], Any]] = {
    "disk": lambda world: "disk",
    "last": _on_the_last_ranks,
}


def _most(plan: fxsched.Plan) -> float:
    """Bytes of the rank that holds the most."""
    return max(peak.at_once.total for peak in plan.memory)
