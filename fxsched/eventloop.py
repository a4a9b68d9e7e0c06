"""The event loop that puts jobs on workers: one virtual clock, one heap of events.

At any time each free worker takes, of the jobs whose predecessors have ended, the one
with the smallest n that the cap allows, and is busy for the job's duration. That is
parallelsim's rule: the job that can start earliest runs, ties go to the smaller n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from .jobs import Direction, Job


class Event(NamedTuple):
    """A job that ran: on which worker, from when to when."""

    job: Job
    worker: int
    start: float
    end: float


def run_jobs(
    preds: Mapping[Job, Sequence[Job]],
    worker: Mapping[Job, int],
    n: Mapping[Job, int],
    duration: Callable[[Job], float],
    cap: Callable[[int], int | None],
    delay: Callable[[Job, Job], float] = lambda pred, job: 0.0,
) -> list[Event]:
    """Jobs in the order in which they start; fewer than given if the cap stops all.

    preds: the jobs that each job waits for; its keys are the jobs, and their order
        breaks ties of n.
    cap: how many microbatches of a stage may be between F and B on the worker of B.
    delay: the time from the end of a job on one worker to the start of another that
        reads it on another worker.
    """
    succs: dict[Job, list[Job]] = {job: [] for job in preds}
    missing: dict[Job, int] = {}
    for job, before in preds.items():
        missing[job] = len(before)
        for pred in before:
            succs[pred].append(job)
    rank = {job: (n[job], i, job) for i, job in enumerate(preds)}
    holder = {job[:2]: worker[job] for job in preds if job[2] is Direction.BACKWARD}
    ready: dict[int, list[tuple[int, int, Job]]] = {w: [] for w in worker.values()}
    parked: dict[tuple[int, int], list[tuple[int, int, Job]]] = {}
    held: dict[tuple[int, int], int] = {}
    busy: set[int] = set()
    ends: list[tuple[float, int, Job]] = []  # of jobs, and of transfers to them
    sent: set[int] = set()  # which of those are transfers
    count = 0
    done: list[Event] = []
    idle = set(ready)
    for job, left in missing.items():
        if not left:
            heappush(ready[worker[job]], rank[job])

    def arrive(job: Job) -> None:
        missing[job] -= 1
        if not missing[job]:
            heappush(ready[worker[job]], rank[job])
            idle.add(worker[job])

    now = 0.0
    while True:
        for w in sorted(idle):
            while ready[w] and w not in busy:
                entry = heappop(ready[w])
                job = entry[2]
                place = (job.stage, holder.get(job[:2], -1))
                if job.direction is Direction.FORWARD and place[1] >= 0:
                    limit = cap(job.stage)
                    if limit is not None and held.get(place, 0) >= limit:
                        heappush(parked.setdefault(place, []), entry)
                        continue
                    held[place] = held.get(place, 0) + 1
                end = now + duration(job)
                done.append(Event(job, w, now, end))
                count += 1
                heappush(ends, (end, count, job))
                busy.add(w)
        if not ends:
            return done
        now = ends[0][0]
        idle.clear()
        while ends and ends[0][0] == now:
            _, number, job = heappop(ends)
            if number in sent:
                arrive(job)
                continue
            busy.discard(worker[job])
            idle.add(worker[job])
            if job.direction is Direction.BACKWARD:
                place = (job.stage, worker[job])
                held[place] -= 1
                if parked.get(place):
                    entry = heappop(parked[place])
                    heappush(ready[worker[entry[2]]], entry)
                    idle.add(worker[entry[2]])
            for succ in succs[job]:
                late = delay(job, succ) if worker[job] != worker[succ] else 0.0
                if late:
                    count += 1
                    sent.add(count)
                    heappush(ends, (now + late, count, succ))
                else:
                    arrive(succ)
