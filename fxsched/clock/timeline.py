"""The timeline of jobs that ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

from ..jobs.job import Job
from .jobs import Jobs


class Event(NamedTuple):
    """A job that ran: the job, its worker, start and end."""

    job: Job
    worker: int
    start: float
    end: float


class Timeline(Sequence[Event]):
    """Jobs that ran, in the order of their starts; equal starts by worker.

    order: the numbers of the jobs.
    start, end: the times of each job, in the unit of the durations.
    """

    def __init__(
        self,
        jobs: Jobs,
        order: Sequence[int],
        start: Sequence[float],
        end: Sequence[float],
    ) -> None:
        self.jobs, self.order, self.start, self.end = jobs, order, start, end

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = self.order[index]
        worker = self.jobs.worker[number]
        return Event(self.jobs.job(number), worker, self.start[index], self.end[index])

    def __iter__(self) -> Iterator[Event]:
        return (self[i] for i in range(len(self)))

    @property
    def complete(self) -> bool:
        """Whether all jobs ran; an in_flight limit may have stopped some."""
        return len(self.order) == len(self.jobs)
