"""Replicas of weights that take steps of their own: which jobs are whose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from .jobs import Jobs


def check_replicas(
    schedule: Schedule, jobs: Jobs, owners: Sequence[int], readers: Sequence[int]
) -> None:
    """Raises PlanError unless each microbatch has one replica of some weights, on the
    worker that runs all jobs which read them, and all have as many in each round.

    owners: the workers that keep the weights. readers: stages that read them.
    """
    every = schedule.update_every or jobs.microbatches
    kinds = [k for k in range(len(jobs.preds)) if jobs.kinds[k][0] in readers]
    for first in range(0, jobs.microbatches, every):
        own: Counter[int] = Counter()
        for b in range(first, first + every):
            numbers = [jobs.find(kind, b) for kind in kinds]
            workers = {jobs.worker[i] for i in numbers}
            places = workers | {jobs.keeper[i] for i in numbers}
            if len(places) > 1 or not places <= set(owners):
                raise PlanError(
                    f"average_every: {jobs.job(numbers[0])} and the other jobs of its "
                    "microbatch that read the same weights are on workers "
                    f"{sorted(places)}, but one worker must keep these weights and run "
                    "all of these jobs; return that worker from w, or keep the modules "
                    "that share weights in one stage, with same_stage="
                )
            own.update(places)
        share = every / len(owners)
        for worker in owners:
            if own[worker] != share:
                raise PlanError(
                    f"average_every: worker {worker} keeps stage {readers[0]} and runs "
                    f"{own[worker]} of microbatches {first}..{first + every - 1}, "
                    f"which are one update on {len(owners)} workers; give each of "
                    "these workers the same number of microbatches, and make "
                    f"update_every a multiple of {len(owners)}"
                )
