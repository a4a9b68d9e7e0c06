"""Gradients on their way to who updates the weights, and what comes back from there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import networkx as nx

from ..jobs.schedule import Schedule
from .jobs import Jobs, weight_owners


class Keepers(NamedTuple):
    """Who keeps a stage's weights: w's workers and u's. root: the one of them that adds
    up the gradients; `updates` if it alone updates the weights."""

    owners: list[int]
    root: int
    updates: bool = False


class Traffic(NamedTuple):
    """What moves between jobs and updates, by worker: sums of gradients that it sends
    to roots, new weights that it gets from them, and bytes of both, of totals that
    roots send to those who update copies of their own, and of replicas to be averaged,
    that come to it."""

    returned: list[int]
    renewed: list[int]
    received: list[int]


def sum_root(owners: list[int] | tuple[int, ...], number: int) -> int:
    """The owner that adds up gradients: of its stages or groups, each in turn."""
    return owners[number % len(owners)]


def stage_keepers(schedule: Schedule, jobs: Jobs) -> dict[int, Keepers]:
    """Who keeps the weights of each stage."""
    keepers = {}
    for stage, owners in weight_owners(jobs).items():
        trained = (stage, schedule.release) in jobs.at
        updater = schedule.updater(stage) if trained else None
        if updater is None:
            keepers[stage] = Keepers(owners, sum_root(owners, stage))
        else:
            owners = sorted({*owners, updater})
            keepers[stage] = Keepers(owners, updater, True)
    return keepers


def state_held(schedule: Schedule, stages: nx.DiGraph[int], jobs: Jobs) -> list[float]:
    """Bytes of the optimizer's state on each worker, of the weights that it updates."""
    held = [0.0] * schedule.workers
    for stage, (owners, root, updates) in stage_keepers(schedule, jobs).items():
        for worker in (root,) if updates else owners:
            held[worker] += float(stages.nodes[stage].get("state", 0.0))
    return held


def weight_size(stages: nx.DiGraph[int], stage: int) -> float:
    """Bytes of a stage's weights, or of finished gradients."""
    whole = float(stages.nodes[stage].get("weights", 0.0))
    return whole - sum_size(stages, stage)


def sum_size(stages: nx.DiGraph[int], stage: int) -> float:
    """Bytes of a sum of the gradients of a stage's weights."""
    data = stages.nodes[stage]
    return float(data.get("gradients", data.get("weights", 0.0) / 2))


def count_traffic(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    jobs: Jobs,
    keepers: dict[int, Keepers],
) -> Traffic:
    """Of a step with all its updates, or with that of the loop after it."""
    count = schedule.workers
    returned, renewed, received = [0] * count, [0] * count, [0] * count
    if schedule.average_every is not None:
        return _averages(schedule, stages, jobs, keepers)
    for stage, givers in _givers(schedule, jobs):
        owners, root, updates = keepers[stage]
        size = int(weight_size(stages, stage))
        for worker in givers:
            if worker != root:
                returned[worker] += 1
                received[root] += int(sum_size(stages, stage))
        for owner in owners:
            if owner != root:
                renewed[owner] += updates
                received[owner] += size
    return Traffic(returned, renewed, received)


def _averages(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    jobs: Jobs,
    keepers: dict[int, Keepers],
) -> Traffic:
    """What averages move: each replica goes to the root, and the mean comes back. With
    `elastic`, what the optimizer keeps is with them at the end of the call alone."""
    every = (schedule.update_every or 1) * (schedule.average_every or 1)
    times, count = jobs.microbatches // every, schedule.workers
    renewed, received = [0] * count, [0] * count
    for stage, (owners, root, _) in keepers.items():
        if (stage, schedule.release) not in jobs.at:
            continue
        moments = stages.nodes[stage].get("moments", 0.0)
        moments *= times if schedule.elastic is None else 1
        size = int(times * weight_size(stages, stage) + moments)
        for owner in owners:
            if owner != root:
                renewed[owner] += times
                received[owner] += size
                received[root] += size
    return Traffic([0] * count, renewed, received)


def _givers(schedule: Schedule, jobs: Jobs) -> Iterator[tuple[int, set[int]]]:
    """The stages, and the workers that give gradients, of each of the updates."""
    every = schedule.update_every or jobs.microbatches
    for k, (stage, d) in enumerate(jobs.kinds):
        if d is not schedule.release:
            continue
        column = [jobs.worker[number] for number in jobs.of(k)]
        for first in range(0, len(column), every):
            yield stage, set(column[first : first + every])
