"""The event loop that puts jobs on workers: one virtual clock, one heap of events.

At any time each free worker takes, of the jobs whose predecessors have ended, the one
with the smallest n that the cap allows, and is busy for the job's duration. That is
parallelsim's rule: the job that can start earliest runs, ties go to the smaller n; and
list scheduling (Graham 1966, Bounds for Certain Multiprocessing Anomalies).

The loop is a discrete-event simulation in the three phases of Tocher (1963, The Art of
Simulation): A, the clock advances to the next event; B, what is bound to happen then
does: jobs end, messages arrive; C, what has become possible is tried: free workers
start ready jobs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from types import MappingProxyType
from typing import NamedTuple

from ..jobs.job import Direction
from .activations import holders, lifetimes
from .jobs import Jobs
from .timeline import Timeline

Delays = Mapping[tuple[int, int], float]


class _Caps(NamedTuple):
    """How many microbatches may be in flight, and where that is counted.

    limit: by kind of F, at the worker of its B. releases: by kind, whether its end
    makes room for a capped F. place: of each job that takes room or gives it back, the
    stage and the worker of its B as a number.
    """

    limit: list[int | None]
    releases: list[bool]
    place: Sequence[int]


class _Queues(NamedTuple):
    """Ranks of jobs by worker. A rank is a job's place by n, ties by number."""

    ranked: list[int]  # the job of each rank
    rank: list[int]  # the rank of each job
    ready: list[list[int]]  # heaps: jobs that nothing is missing for
    strict: list[list[int]]  # if in_order: those to come, the next one last


def _caps(jobs: Jobs, cap: Callable[[int], int | None], release: Direction) -> _Caps:
    limits: list[int | None] = [None] * len(jobs.kinds)
    releases = [False] * len(jobs.kinds)
    for life in lifetimes(jobs, release):
        limit = cap(jobs.kinds[life.forward][0])
        limits[life.forward], releases[life.release] = limit, limit is not None
    if not any(releases):
        return _Caps(limits, releases, ())
    (kind, _, worker), holder = jobs.columns, holders(jobs, release)
    place = (kind[holder] * jobs.workers + worker[holder]).tolist()
    return _Caps(limits, releases, place)


def _queues(jobs: Jobs, missing: Sequence[int], in_order: bool) -> _Queues:
    ranked = sorted(range(len(jobs)), key=jobs.n.__getitem__)
    rank = [0] * len(jobs)
    ready: list[list[int]] = [[] for _ in range(jobs.workers)]
    strict: list[list[int]] = [[] for _ in range(jobs.workers if in_order else 0)]
    for r, j in enumerate(ranked):
        rank[j] = r
        if not missing[j]:
            ready[jobs.worker[j]].append(r)  # in rising order, which is a heap
        if in_order:
            strict[jobs.worker[j]].append(r)
    for line in strict:
        line.reverse()
    return _Queues(ranked, rank, ready, strict)


class _State(NamedTuple):
    """What changes while jobs run.

    missing: by job, how many results and waits are to come.
    calendar: the future events, a heap by time: j for its end; -1 - j for a message
        that j reads.
    candidates: workers that may have something new to start.
    in_flight, parked: by kind and worker of B, how many microbatches are there and, in
        heaps, the F that wait for one to leave.
    """

    missing: list[int]
    free: list[bool]
    calendar: list[tuple[float, int]]
    candidates: set[int]
    in_flight: dict[int, int]
    parked: dict[int, list[int]]


# What is called once for each time on the clock is a closure, and all else is in line:
# a call for each of a million events is felt, and so is a look at an attribute.


def run_jobs(
    jobs: Jobs,
    seconds: Sequence[float],
    cap: Callable[[int], int | None] = lambda stage: None,
    release: Direction = Direction.BACKWARD,
    delays: Delays = MappingProxyType({}),
    in_order: bool = False,
) -> Timeline:
    """Jobs in the order in which they start; not complete if the cap stops all.

    seconds: how long each job takes.
    cap: how many microbatches of a stage may be between F and `release` on the worker
        of B.
    delays: how long what one kind makes takes to another kind, by both, where they are
        on other workers; none if there are none.
    in_order: a worker runs its jobs strictly by n.
    """
    caps, missing = _caps(jobs, cap, release), list(jobs.awaited)
    queues, free = _queues(jobs, missing, in_order), [True] * jobs.workers
    calendar: list[tuple[float, int]] = []
    candidates, in_flight = set(range(jobs.workers)), defaultdict[int, int](int)
    parked = defaultdict[int, list[int]](list)
    state = _State(missing, free, calendar, candidates, in_flight, parked)
    advance = _bound_events(jobs, caps, queues, delays, state)
    (ranked, _, ready, strict), (limits, _, place) = queues, caps
    kind, now = jobs.kind, 0.0
    order, starts = list[int](), list[float]()
    while True:
        # C: each free worker starts its first ready job, but for those that caps park
        for w in sorted(candidates) if len(candidates) > 1 else candidates:
            queue = ready[w]
            while queue and free[w]:
                if strict and queue[0] != strict[w][-1]:
                    break
                r = heappop(queue)
                j = ranked[r]
                limit = limits[kind[j]]
                if limit is not None:
                    if in_flight[place[j]] >= limit:
                        heappush(parked[place[j]], r)
                        continue
                    in_flight[place[j]] += 1
                if strict:
                    strict[w].pop()
                free[w] = False
                order.append(j)
                starts.append(now)
                heappush(calendar, (now + seconds[j], j))
        if not calendar:
            ends = [start + seconds[j] for start, j in zip(starts, order, strict=True)]
            return Timeline(jobs, order, starts, ends)
        now = advance()


def _bound_events(
    jobs: Jobs, caps: _Caps, queues: _Queues, delays: Delays, state: _State
) -> Callable[[], float]:
    """Phases A and B: the clock advances to the time that is returned; what is due then
    happens: jobs end, what they made arrives. Jobs that then miss nothing are ready,
    their workers candidates."""
    kind, worker, waits = jobs.kind, jobs.worker, jobs.waits
    (head, readers), (_, releases, places) = jobs.readers, caps
    ranked, rank, ready, _ = queues
    missing, free, calendar, candidates, in_flight, parked = state

    def advance() -> float:
        candidates.clear()
        now = calendar[0][0]
        arrived: list[int] = []  # jobs, once for each thing that they waited for
        while calendar and calendar[0][0] == now:
            j = heappop(calendar)[1]
            if j < 0:
                arrived.append(-1 - j)
                continue
            w = worker[j]
            free[w] = True
            candidates.add(w)
            if releases[kind[j]]:
                place = places[j]
                in_flight[place] -= 1
                if parked[place]:
                    r = heappop(parked[place])
                    heappush(ready[worker[ranked[r]]], r)
                    candidates.add(worker[ranked[r]])
            if waits:
                arrived += waits.get(j, ())
            if not delays:
                arrived += readers[head[j] : head[j + 1]]
                continue
            for t in readers[head[j] : head[j + 1]]:
                delay = 0.0 if worker[t] == w else delays[kind[j], kind[t]]
                if delay:
                    heappush(calendar, (now + delay, -1 - t))
                else:
                    arrived.append(t)
        for j in arrived:
            left = missing[j] = missing[j] - 1
            if not left:
                w = worker[j]
                heappush(ready[w], rank[j])
                if free[w]:
                    candidates.add(w)
        return now

    return advance
