"""Updates in order of arrival: which of them one waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from ..jobs.schedule import Schedule
from .jobs import Jobs


class Rounds:
    """The updates of a stage by rounds: that of microbatch b is of round r if the
    worker that gives its gradient has given r before.

    workers: who gives the gradient of each microbatch.
    """

    def __init__(self, workers: Sequence[int]) -> None:
        self.number: list[int] = []  # of microbatches
        self.members: list[list[int]] = []  # of rounds
        self.last: list[list[int]] = []  # the same worker's update before, if any
        given: dict[int, list[int]] = {}
        for b, worker in enumerate(workers):
            own = given.setdefault(worker, [])
            if len(own) == len(self.members):
                self.members.append([])
            self.members[len(own)].append(b)
            self.number.append(len(own))
            self.last.append(own[-1:])
            own.append(b)

    def awaited(self, microbatch: int, ahead: float) -> list[int]:
        """The updates that one waits for, so that at no time a worker has had more than
        `ahead` more than another: its worker's last, and the whole round `ahead` rounds
        before its own. By microbatch."""
        number = self.number[microbatch]
        early = self.members[int(number - ahead)] if number >= ahead else []
        return sorted({*self.last[microbatch], *early})


def update_rounds(
    schedule: Schedule, jobs: Jobs, stages: Iterable[int]
) -> dict[int, Rounds]:
    """The rounds of each of some stages."""
    gives = {stage: jobs.of(jobs.at[stage, schedule.release]) for stage in stages}
    return {
        stage: Rounds([jobs.worker[number] for number in numbers])
        for stage, numbers in gives.items()
    }


def ahead_text(ahead: float) -> str:
    """How far workers may be apart, for people."""
    if ahead == inf:
        return "in order of arrival, no worker waiting for another"
    return f"in order of arrival, no worker more than {ahead} ahead of another"
