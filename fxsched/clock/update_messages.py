"""What is sent around updates: sums of gradients before, new weights after them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..jobs.schedule import Schedule
from .jobs import Jobs
from .timeline import Timeline
from .weight_fetches import source_of
from .weight_traffic import Keepers


@dataclass
class Sum:
    """The gradients of a stage for one update, at the worker that adds them up.

    missing: workers whose sums are to come. frees: updates that wait for the total.
    """

    stage: int
    missing: int
    frees: tuple[int, ...]


@dataclass(frozen=True)
class Renewal:
    """New weights, on their way from the update of a stage to a worker with a copy; or
    where they are made, owner, for those who fetch them there.

    frees: jobs that read the copy. fetched: jobs that fetch.
    """

    stage: int
    update: int
    owner: int
    frees: tuple[int, ...] = ()
    fetched: tuple[int, ...] = ()


def gradient_sums(
    schedule: Schedule, timeline: Timeline, jobs: Jobs
) -> tuple[list[Sum], dict[int, int]]:
    """The sums of a step, by update and stage, and which of them jobs end: the last of
    the stage on a worker before the update."""
    every = schedule.update_every or jobs.microbatches
    lasts: dict[tuple[int, int, int], int] = {}
    for number in timeline.order:
        if number >= jobs.regular:
            continue
        stage, b, d = jobs.job(number)
        if d is schedule.release:
            lasts[b // every, stage, jobs.worker[number]] = number
    places: dict[tuple[int, int], int] = {}
    sums: list[Sum] = []
    ends: dict[int, int] = {}
    for (number_of_update, stage, _), number in sorted(lasts.items()):
        place = places.setdefault((number_of_update, stage), len(sums))
        if place == len(sums):
            sums.append(Sum(stage, 0, tuple(_updates_after(jobs, number))))
        sums[place].missing += 1
        ends[number] = place
    return sums, ends


def _updates_after(jobs: Jobs, number: int) -> Iterator[int]:
    """The updates that wait for a job."""
    return (after for after in jobs.waits.get(number, ()) if after >= jobs.regular)


def renewals(
    jobs: Jobs, keepers: Mapping[int, Keepers], origin: Mapping[int, int]
) -> Iterator[Renewal]:
    """What becomes of the weights that updates make.

    origin: from where jobs fetch weights.
    """
    for update in jobs.updates:
        stage, here = jobs.job(update).stage, jobs.worker[update]
        readers = [j for j in jobs.waits.get(update, ()) if j < jobs.regular]
        fetched = tuple(j for j in readers if origin.get(j) == here)
        if fetched:
            yield Renewal(stage, update, here, (), fetched)
        owners, _, alone = keepers[stage]
        for owner in owners if alone else ():
            if owner != here:
                copied = (j for j in readers if _source(owners, jobs, j) == owner)
                yield Renewal(stage, update, owner, tuple(copied))


def _source(owners: list[int], jobs: Jobs, number: int) -> int:
    """The owner whose copy a job reads."""
    return source_of(owners, jobs.keeper[number], jobs.worker[number])
