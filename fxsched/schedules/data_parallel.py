"""Schedules whose workers run whole microbatches, and copies of any schedule."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx

from ..jobs import Direction, Job, Placement, PlanError, Schedule
from .arguments import equal_shares, groups, positive
from .orders import microbatch_first


def ddp(workers: int, microbatches: int | None = None) -> Schedule:
    """Every worker keeps all weights, runs whole microbatches: w = (b mod W, b mod W).

    One microbatch a worker unless given. PyTorch Distributed (Li et al. 2020, arXiv
    2006.15704).
    """
    microbatches = equal_shares("ddp", workers, microbatches)
    return Schedule(
        workers,
        microbatches,
        w=lambda s, b, d: Placement(b % workers, b % workers),
        n=microbatch_first,
        name="ddp",
    )


def fsdp(workers: int, microbatches: int | None = None) -> Schedule:
    """As ddp, with stage s kept by one worker: w = (s mod W, b mod W).

    ZeRO stage 3 (Rajbhandari et al. 2020, arXiv 1910.02054).
    """
    microbatches = equal_shares("fsdp", workers, microbatches)
    return Schedule(
        workers,
        microbatches,
        w=lambda s, b, d: Placement(s % workers, b % workers),
        n=microbatch_first,
        name="fsdp",
    )


def hsdp(workers: int, group_size: int, microbatches: int | None = None) -> Schedule:
    """fsdp inside groups of R workers, replicas across them.

    A stage's weights are on one worker of each group: R times fewer than with ddp, and
    fetched inside the group alone. Hybrid sharding of PyTorch FSDP (Zhao et al. 2023,
    arXiv 2304.11277).
    """
    count = groups("hsdp", workers, group_size)
    microbatches = equal_shares("hsdp", workers, microbatches)
    inside = fsdp(group_size, microbatches // count)
    return replace(replicate(inside, count), name="hsdp")


def replicate(schedule: Schedule, groups: int) -> Schedule:
    """Any schedule, data-parallel: `groups` copies of it, each on workers and on
    microbatches of its own.

    Group g has the workers g W to g W + W - 1, and keeps a copy of the weights where
    the schedule keeps them. Microbatch b goes to group b mod groups, as ddp deals them
    out, and is number b // groups there; n, caps and the rest stay those of the
    schedule. A step takes as long as that of one copy.

    Raises PlanError if it isn't a schedule, or groups not an int of 1 or more.
    """
    if not isinstance(schedule, Schedule):
        raise PlanError(f"replicate(schedule={schedule!r}): give a Schedule")
    positive("replicate", groups=groups)
    fit, every, version = schedule.fit, schedule.update_every, schedule.version

    def w(s: int, b: int, d: Direction) -> Placement:
        first = b % groups * schedule.workers
        inside = schedule.place(Job(s, b // groups, d))
        return Placement(first + inside.weights, first + inside.compute)

    def fit_copies(stages: nx.DiGraph[int]) -> Schedule:
        return replicate(schedule.fitted(stages), groups)

    return replace(
        schedule,
        workers=schedule.workers * groups,
        microbatches=schedule.microbatches * groups,
        w=w,
        n=lambda s, b, d: schedule.n(s, b // groups, d),
        fit=None if fit is None else fit_copies,
        update_every=every and every * groups,
        version=version and (lambda s, b, d: version(s, b // groups, d)),
        name=f"{groups} x {schedule.name or 'schedule'}",
    )
