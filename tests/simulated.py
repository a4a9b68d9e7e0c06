"""Schedules of the library in any size, and what their simulated workers hold."""

from __future__ import annotations

import inspect
from dataclasses import replace

from fxsched import Schedule, Simulation, schedules, simulate
from fxsched.accounts.workers import Worker

# equal shares of microbatches
WHOLE = (
    "ddp",
    "fsdp",
    "hsdp",
    "zero1",
    "zero2",
    "sharded_groups",
    "hybrid",
    "local_sgd",
    "interleaved",
)


def library(name: str, workers: int, microbatches: int) -> Schedule:
    """A schedule of the library near these sizes."""
    make = schedules.LIBRARY[name]
    given = {"workers": workers, "microbatches": microbatches}
    if name in WHOLE or name.endswith("server"):
        given["microbatches"] *= workers
    if name.endswith("server"):
        given["workers"] += inspect.signature(make).parameters["servers"].default
    if name == "overflow":
        given["workers"] += 1
    if name in ("pipedream_2bw", "stale_by_one"):
        given["microbatches"] *= workers
    if name == "local_sgd":
        given["every"] = 1
    if "group_size" in inspect.signature(make).parameters:
        given["group_size"] = workers if workers % 2 else workers // 2
    return make(**given)


def stages_of(schedule: Schedule) -> int:
    return schedule.stages or schedule.workers + 1


def run(schedule: Schedule, times: tuple[float, ...], transfer: float) -> Simulation:
    durations = dict(zip("FBW", times, strict=False))
    return simulate(schedule, stages_of(schedule), durations, transfer)


def held(ran: Simulation) -> list[int]:
    return [worker.peak_activations for worker in ran.workers]


def kept(ran: Simulation) -> list[int]:
    return [worker.weights_held for worker in ran.workers]


def inside(ran: Simulation) -> list[Worker]:
    """The workers without what copies send to each other: gradients, new weights."""
    return [
        replace(worker, gradients_returned=0, weights_renewed=0)
        for worker in ran.workers
    ]
