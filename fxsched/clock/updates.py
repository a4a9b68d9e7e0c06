"""Steps of the optimizer among the jobs of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..jobs.job import Direction, Job, PlanError
from ..jobs.schedule import Schedule
from .jobs import Jobs, source_of
from .replicas import check_replicas


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
    microbatches, after the gradients of all of them and the update before it, and
    before the jobs whose weights have seen it. That of a replica waits for its own
    microbatches, and jobs that read an average for all replicas.

    n says when, but an update is never before what it waits for.
    """
    every = schedule.update_every
    if every is None or not stages:
        return jobs
    alone = schedule.average_every is not None
    for each in stages if alone else ():
        check_replicas(schedule, jobs, each.workers, each.readers)
    kind, rows, worker, n = (
        list(column) for column in (jobs.kind, jobs.rows, jobs.worker, jobs.n)
    )
    waits = {number: list(after) for number, after in jobs.waits.items()}
    together = sum(len(stage.workers) for stage in stages)  # updates of one round
    gives = [[_release(jobs, schedule, g) for g in stage.givers] for stage in stages]
    for last in schedule.updated(every):
        own = range(last - every + 1, last + 1)
        for place, stage in enumerate(stages):
            every_before = (jobs.find(k, b) for b in own for k in gives[place])
            before = list(dict.fromkeys(every_before))
            rank = schedule.priority(Job(stage.stage, last, Direction.UPDATE))
            rank = max([rank, *(n[number] for number in before)])
            for updater in stage.workers:
                new = len(worker)
                if new - together >= jobs.regular:  # the same worker's last one
                    waits.setdefault(new - together, []).append(new)
                for number in before:
                    if not alone or worker[number] == updater:
                        waits.setdefault(number, []).append(new)
                kind.append(len(jobs.preds) + place)
                rows.append(last)
                worker.append(updater)
                n.append(rank)
    jobs = replace(jobs, versions=_versions(schedule, jobs, every))
    for update, number in _reads(schedule, jobs, stages):
        waits.setdefault(jobs.regular + update, []).append(number)
    return replace(
        jobs,
        kinds=(*jobs.kinds, *((each.stage, Direction.UPDATE) for each in stages)),
        kind=kind,
        rows=rows,
        keeper=[*jobs.keeper, *worker[jobs.regular :]],
        worker=worker,
        n=n,
        waits=waits,
        gaps=[*jobs.gaps, *[0.0] * len(stages)] if jobs.gaps else (),
    )


def _versions(schedule: Schedule, jobs: Jobs, every: int) -> list[int]:
    """How many updates the weights of each job have seen, each asked once."""
    if schedule.version is None:
        return [b // every for b in jobs.rows]
    return [schedule.seen(jobs.job(i)) for i in range(len(jobs))]


def _reads(
    schedule: Schedule, jobs: Jobs, stages: Sequence[StageUpdate]
) -> Iterator[tuple[int, int]]:
    """The updates that jobs wait for, by their places among the updates, and the jobs:
    the first of a microbatch that reads what a worker's update made."""
    ahead = [len(stage.workers) for stage in stages]
    first = [sum(ahead[:i]) for i in range(len(stages))]
    reads = [[i for i, u in enumerate(stages) if s in u.readers] for s, _ in jobs.kinds]
    for b in range(jobs.microbatches):
        seen: dict[tuple[int, int], int] = {}  # by stage and update, the most so far
        for kind, (s, _) in enumerate(jobs.kinds):
            number = jobs.find(kind, b)
            version = jobs.version(number)
            for i in reads[kind] if not (b and kind in jobs.joint) else ():
                here = jobs.keeper[number], jobs.worker[number]
                source = source_of(stages[i].workers, *here)
                averaged = version and schedule.averages(version)
                for worker in stages[i].workers if averaged else (source,):
                    update = first[i] + stages[i].workers.index(worker)
                    if version > seen.get((s, update), 0):
                        seen[s, update] = version
                        yield (version - 1) * sum(ahead) + update, number


def stopped_by_order(schedule: Schedule, jobs: Jobs, number: int) -> PlanError | None:
    """What to say of a job that never runs, where workers take theirs strictly by n,
    which was made without updates between them; None for other schedules."""
    if not schedule.in_order or len({jobs.rows[i] for i in jobs.updates}) < 2:
        return None
    called = f" {schedule.name}" if schedule.name else ""
    return PlanError(
        f"in_order stops the schedule{called}: {jobs.job(number)} never "
        "runs, for its worker's next job by n waits for it, or for an update after it; "
        "give n an order in which that comes later, or dataclasses.replace(schedule, "
        "in_order=False), or update_every=None for one update a call"
    )


def _release(jobs: Jobs, schedule: Schedule, stage: int) -> int:
    """The kind of a stage's jobs that give gradients of weights: W, or B."""
    backward = jobs.at[stage, Direction.BACKWARD]
    return jobs.at.get((stage, schedule.release), backward)
