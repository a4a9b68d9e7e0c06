"""Divides any schedule's stages into shards, each on its own worker."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx

from ..jobs.job import Direction, Placement, PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import positive
from .arguments import constructor
from .parked import moved


@constructor
def sharded(schedule: Schedule, shards: int) -> Schedule:
    """Makes any schedule tensor-parallel: each worker becomes `shards` workers.

    Each of these workers runs one shard of the stages of the original worker. Shard p
    of a stage on worker v is on worker shards * v + p, and so are the shard's weights:
    w(s, b, d, p) = shards * w(s, b, d) + p. n, in_flight and all other settings are
    those of the schedule. Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053).
    backend(shards=) sets which weights are cut, and how.

    Raises PlanError if `schedule` isn't a schedule or is already sharded, or if shards
    isn't an int of 1 or more.
    """
    if not isinstance(schedule, Schedule):
        raise PlanError(f"sharded(schedule={schedule!r}): give a Schedule")
    positive("sharded", shards=shards)
    if schedule.shards > 1:
        raise PlanError(
            f"sharded: {schedule.name or 'the schedule'} has {schedule.shards} shards "
            f"already; give sharded(schedule, {schedule.shards * shards}) the schedule "
            "without shards"
        )
    fit, updater = schedule.fit, schedule.u

    def w(s: int, b: int, d: Direction, p: int = 0) -> Placement:
        place = Placement(*schedule.w(s, b, d))
        return moved(place, lambda worker: shards * worker + p)

    def u(s: int, b: int, p: int = 0) -> int:
        assert updater is not None, "asked where there is one"
        return shards * updater(s, b) + p

    def fit_shards(stages: nx.DiGraph[int]) -> Schedule:
        return sharded(schedule.fitted(stages), shards)

    return replace(
        schedule,
        workers=schedule.workers * shards,
        shards=shards,
        w=schedule.w if schedule.is_open else w,
        u=updater and u,
        fit=fit and fit_shards,
        candidates=(),
        name=f"{schedule.name or 'schedule'} x {shards} shards",
    )
