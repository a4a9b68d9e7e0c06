"""Shards of any schedule's stages, each on a worker of its own."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx

from ..jobs.job import Direction, Placement, PlanError
from ..jobs.schedule import Schedule
from .arguments import positive


def sharded(schedule: Schedule, shards: int) -> Schedule:
    """Any schedule, tensor-parallel: each of its workers becomes `shards` workers, each
    of which has a shard of the stages that it had.

    Shard p of what ran on worker v is on worker shards * v + p, and so are its weights:
    w(s, b, d, p) = shards * w(s, b, d) + p; n, caps and the rest stay those of the
    schedule. Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053). Which weights are
    cut, and how, says backend(shards=).

    Raises PlanError if it isn't a schedule, shards not an int of 1 or more, or for one
    that is sharded already.
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
        return Placement(*(shards * worker + p for worker in schedule.w(s, b, d)))

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
        name=f"{schedule.name or 'schedule'} x {shards} shards",
    )
