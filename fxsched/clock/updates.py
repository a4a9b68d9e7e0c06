"""Steps of the optimizer among the jobs of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..jobs import Direction, Job, Schedule
from .timeline import Jobs


class StageUpdate(NamedTuple):
    """A stage whose weights are updated.

    workers: those that take the step, each on its own copy of the weights.
    givers: stages whose jobs give gradients of them; it waits for these.
    readers: stages whose jobs read them; those of the next microbatches wait for it.
    """

    stage: int
    workers: tuple[int, ...]
    givers: tuple[int, ...]
    readers: tuple[int, ...]


def add_updates(schedule: Schedule, jobs: Jobs, stages: Sequence[StageUpdate]) -> Jobs:
    """The jobs with an update of each of these stages every schedule.update_every
    microbatches, after the gradients of all of them, and before the next F that reads.

    n says when, but an update is never before what it waits for.
    """
    every, width = schedule.update_every, len(jobs.kinds)
    if every is None or not stages:
        return jobs
    compute, n = list(jobs.compute), list(jobs.n)
    more = {number: list(after) for number, after in jobs.more.items()}
    updates: list[tuple[int, int]] = []
    for last in schedule.updated(every):
        own, coming = (
            range(last - every + 1, last + 1),
            range(last + 1, last + every + 1),
        )
        for stage, workers, givers, readers in stages:
            kinds = [_release(jobs, schedule, giver) for giver in givers]
            before = [b * width + kind for b in own for kind in kinds]
            rank = schedule.priority(Job(stage, last, Direction.UPDATE))
            rank = max([rank, *(n[number] for number in before)])
            first = len(compute)
            for worker in workers:
                for number in before:
                    more.setdefault(number, []).append(len(compute))
                compute.append(worker)
                n.append(rank)
                updates.append((stage, last))
            if last == schedule.microbatches - 1:
                continue
            for reader in readers:
                for b in coming:
                    number = b * width + jobs.at[reader, Direction.FORWARD]
                    keeper = jobs.weights[number]
                    copy = workers.index(keeper) if keeper in workers else 0
                    more.setdefault(first + copy, []).append(number)
    return replace(jobs, compute=compute, n=n, more=more, updates=tuple(updates))


def _release(jobs: Jobs, schedule: Schedule, stage: int) -> int:
    """The kind of a stage's jobs that give gradients of weights: W, or B."""
    backward = jobs.at[stage, Direction.BACKWARD]
    return jobs.at.get((stage, schedule.release), backward)
