"""Schedules whose workers run whole microbatches, and copies of any schedule."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx

from ..jobs.job import Direction, Job, Placement, PlanError
from ..jobs.per_shard import for_shard
from ..jobs.schedule import Schedule
from .arguments import equal_shares, groups, one_of, positive
from .orders import microbatch_first
from .sharded_optimizer import share_optimizer

STAGES = 1 << 20  # above all numbers of stages


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


def zero1(workers: int, microbatches: int | None = None) -> Schedule:
    """As ddp, with the optimizer's state of each stage on one worker:
    w = (b mod W, b mod W), u = s mod W, n(s, b, U) above all others.

    Once a model is cut into stages, u deals out their bytes: the largest stage to the
    worker that has least so far, then the next. It takes W stages or more for each
    worker to have some; where their number is left open the planner makes it a
    multiple of W, as for ddp.

    ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054) keeps all gradients until
    the step. Here a worker's sums leave and are freed after its own last B of a stage
    in any case, and it costs no message more. What zero1 keeps, where the optimizer is
    in the program, is what the worker that u names has been sent: U comes after all F
    and B. Where the loop steps, zero1 and zero2 differ in nothing.
    """
    return _zero("zero1", workers, microbatches, 1)


def zero2(workers: int, microbatches: int | None = None) -> Schedule:
    """As zero1, with the update of a stage as soon as its own last B is done:
    n(s, b, U) = n(s, b, B), below those of all B to come.

    Its gradients are summed, used and freed while earlier stages still run B. ZeRO
    stage 2 (Rajbhandari et al. 2020, arXiv 1910.02054); fsdp is stage 3.
    """
    return _zero("zero2", workers, microbatches, 2)


def _zero(name: str, workers: int, microbatches: int | None, zero: int) -> Schedule:
    def n(s: int, b: int, d: Direction) -> int:
        """By turns of all workers, then data flow: U comes before B of other stages."""
        place = s if d is Direction.FORWARD else STAGES - 1 - s
        return STAGES * (b // workers) + place

    microbatches = equal_shares(name, workers, microbatches)
    replicas = replace(ddp(workers, microbatches), n=n, name=name)
    return share_optimizer(replicas, zero)


def replicate(schedule: Schedule, groups: int, zero: int | None = None) -> Schedule:
    """Any schedule, data-parallel: `groups` copies of it, each on workers and on
    microbatches of its own.

    Group g has the workers g W to g W + W - 1, and keeps a copy of the weights where
    the schedule keeps them. Microbatch b goes to group b mod groups, as ddp deals them
    out, and is number b // groups there; n, caps and the rest stay those of the
    schedule. A step takes as long as that of one copy.

    zero: None, or 1 or 2 for copies of a stage that share its optimizer's state, as in
        zero1 and zero2: u deals out the stages that a worker keeps, the largest first,
        between it and those in its place in other groups (Rajbhandari et al. 2020,
        arXiv 1910.02054). A worker has a share of its own where it keeps as many stages
        as there are groups, or more. None leaves u as the schedule has it.
    Raises PlanError if it isn't a schedule, groups not an int of 1 or more, or for
    another zero.
    """
    if not isinstance(schedule, Schedule):
        raise PlanError(f"replicate(schedule={schedule!r}): give a Schedule")
    positive("replicate", groups=groups)
    one_of("replicate", "zero", zero, (None, 1, 2))
    if schedule.ahead:
        raise PlanError(
            f"replicate: {schedule.name or 'the schedule'} updates in order of arrival "
            f"(ahead={schedule.ahead}), and each copy of the weights would get the "
            "updates in another order; give the schedule more workers instead"
        )
    fit, every, version = schedule.fit, schedule.update_every, schedule.version

    def w(s: int, b: int, d: Direction, p: int = 0) -> Placement:
        first = b % groups * schedule.workers
        inside = schedule.place(Job(s, b // groups, d), p)
        return Placement(first + inside.weights, first + inside.compute)

    def n(s: int, b: int, d: Direction, p: int = 0) -> int:
        priority: int = for_shard(schedule.n, p)(s, b // groups, d)
        return priority

    def seen(s: int, b: int, d: Direction, p: int = 0) -> int:
        assert version is not None, "asked where there is one"
        updates: int = for_shard(version, p)(s, b // groups, d)
        return updates

    def fit_copies(stages: nx.DiGraph[int]) -> Schedule:
        return replicate(schedule.fitted(stages), groups)

    copies = replace(
        schedule,
        workers=schedule.workers * groups,
        microbatches=schedule.microbatches * groups,
        w=schedule.w if schedule.is_open else w,
        n=n,
        fit=None if fit is None else fit_copies,
        update_every=every and every * groups,
        version=version and seen,
        name=f"{groups} x {schedule.name or 'schedule'}",
    )
    return copies if zero is None else share_optimizer(copies, zero)
