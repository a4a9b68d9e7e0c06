"""Schedules whose workers run whole microbatches, and copies of any schedule."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx

from ..jobs.job import Direction, Job, Placement, PlanError
from ..jobs.per_shard import for_shard
from ..jobs.schedule import Schedule
from ..jobs.user_values import positive
from .arguments import constructor, equal_shares, groups, one_of
from .orders import microbatch_first
from .parked import moved
from .sharded_optimizer import share_optimizer

STAGES = 1 << 20  # above all numbers of stages


@constructor
def ddp(workers: int, microbatches: int | None = None) -> Schedule:
    """Every worker keeps all weights and runs whole microbatches.

    w = (b mod W, b mod W). By default one microbatch per worker. PyTorch Distributed
    (Li et al. 2020, arXiv 2006.15704).
    """
    microbatches = equal_shares("ddp", workers, microbatches)
    return Schedule(
        workers,
        microbatches,
        w=lambda s, b, d: Placement(b % workers, b % workers),
        n=microbatch_first,
        name="ddp",
    )


@constructor
def fsdp(workers: int, microbatches: int | None = None) -> Schedule:
    """As ddp, but one worker keeps stage s: w = (s mod W, b mod W).

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


@constructor
def hsdp(workers: int, group_size: int, microbatches: int | None = None) -> Schedule:
    """fsdp inside groups of R workers, with replicas across groups.

    In each group one worker keeps a stage's weights: R times fewer workers than with
    ddp. Weights are fetched inside a group only. Hybrid sharding of PyTorch FSDP (Zhao
    et al. 2023, arXiv 2304.11277).
    """
    count = groups("hsdp", workers, group_size)
    microbatches = equal_shares("hsdp", workers, microbatches)
    inside = fsdp(group_size, microbatches // count)
    return replace(replicate(inside, count), name="hsdp")


@constructor
def zero1(workers: int, microbatches: int | None = None) -> Schedule:
    """As ddp, but one worker keeps a stage's optimizer state.

    w = (b mod W, b mod W), u = s mod W, and n(s, b, U) is larger than all other n.

    Once a model is cut into stages, u balances bytes: the largest stage goes to the
    worker with the fewest bytes so far, then the next largest. Each worker gets a share
    only if there are W stages or more. If the number of stages is open, the planner
    chooses a multiple of W, as for ddp.

    In ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054) each worker keeps all
    gradients until the step. Here each worker sends its sum of a stage's gradients
    after its own last B of the stage, and frees the sum, without extra messages. If the
    program has the optimizer, the worker u keeps the sums that it receives until U,
    which runs after all F and B. If your loop steps the optimizer, zero1 and zero2 are
    the same.
    """
    return _zero("zero1", workers, microbatches, 1)


@constructor
def zero2(workers: int, microbatches: int | None = None) -> Schedule:
    """As zero1, but a stage's update runs as soon as its last B is done.

    n(s, b, U) = n(s, b, B), which is smaller than n of all later B. The stage's
    gradients are summed, used and freed while earlier stages still run B. ZeRO stage 2
    (Rajbhandari et al. 2020, arXiv 1910.02054); fsdp is stage 3.
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


@constructor
def replicate(schedule: Schedule, groups: int, zero: int | None = None) -> Schedule:
    """Makes any schedule data-parallel: runs `groups` copies of it.

    Each copy has its own workers and microbatches. Group g has the workers g W to g W +
    W - 1, and keeps a copy of the weights on the workers where the schedule keeps them.
    Microbatch b goes to group b mod groups, as in ddp, and has the number b // groups
    there. n, in_flight and all other settings are those of the schedule. A step takes
    as long as a step of one copy.

    zero: 1 or 2: the copies of a stage share its optimizer state, as in zero1 and zero2
        (Rajbhandari et al. 2020, arXiv 1910.02054): one worker updates a stage, and
        sends the new weights to the other copies. u divides the stages of a worker, the
        largest first, between this worker and those in the same place of the other
        groups. If a worker keeps fewer stages than there are groups, some of these
        workers update none. None: u is that of the schedule.
    Raises PlanError if `schedule` isn't a schedule, groups isn't an int of 1 or more,
    or zero has another value.
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
        return moved(inside, lambda worker: first + worker)

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
        candidates=(),
        update_every=every and every * groups,
        version=version and seen,
        name=f"{groups} x {schedule.name or 'schedule'}",
    )
    return copies if zero is None else share_optimizer(copies, zero)
