"""The optimizer's state, shared between the workers that keep the weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import networkx as nx

from ..jobs.job import Direction, Job
from ..jobs.per_shard import for_shard
from ..jobs.schedule import Schedule

LAST = 1 << 60  # above all n


def share_optimizer(schedule: Schedule, zero: int) -> Schedule:
    """The schedule with u that deals out stages to the workers that keep them.

    The largest stage goes first, each shard of it to the one of its keepers that has
    the fewest bytes so far (Graham's longest processing time first); where no sizes are
    known, each stage counts as much. zero: 1 for updates after all other jobs, 2 for
    each as soon as its stage is done.
    """

    def fit(stages: nx.DiGraph[int]) -> Schedule:
        sizes = [stages.nodes[s].get("weights", 0.0) for s in sorted(stages)]
        return _shared(schedule.fitted(stages), zero, sizes)

    return replace(_shared(schedule, zero), fit=fit)


def _shared(
    schedule: Schedule, zero: int, sizes: Sequence[float] | None = None
) -> Schedule:
    shards = range(schedule.shards)

    def n(s: int, b: int, d: Direction, p: int = 0) -> int:
        if d is Direction.UPDATE and zero == 1:
            return LAST + b
        release = schedule.release if d is Direction.UPDATE else d
        priority: int = for_shard(schedule.n, p)(s, b, release)
        return priority

    @cache
    def keepers(s: int, p: int) -> list[int]:
        jobs = (
            Job(s, b, d)
            for b in range(schedule.microbatches)
            for d in schedule.directions
        )
        return sorted({schedule.place(job, p).weights for job in jobs})

    @cache
    def dealt(count: int) -> dict[tuple[int, int], int]:
        """The updater of each shard of so many stages."""
        bytes_of = sizes if sizes is not None else [0.0] * count
        # by bytes, then by stages, then by number
        load = [(0.0, 0, worker) for worker in range(schedule.workers)]
        updaters = {}
        stages = sorted(range(count), key=lambda s: -bytes_of[s])
        for s, p in itertools.product(stages, shards):
            size, number, worker = min(load[worker] for worker in keepers(s, p))
            load[worker] = (size + bytes_of[s], number + 1, worker)
            updaters[s, p] = worker
        return updaters

    def u(s: int, b: int, p: int = 0) -> int:
        return dealt(s + 1 if sizes is None else len(sizes))[s, p]

    return replace(schedule, n=n, u=u)
