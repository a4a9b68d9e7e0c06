"""The event loop that puts jobs on workers: one virtual clock, one heap of events.

At any time each free worker takes, of the jobs whose predecessors have ended, the one
with the smallest n that the cap allows, and is busy for the job's duration. That is
parallelsim's rule: the job that can start earliest runs, ties go to the smaller n.

Jobs are numbers here: those of microbatch b are b * K to b * K + K - 1, where K is how
many kinds of jobs, (stage, direction), a microbatch has. That makes millions cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple, overload

from ..jobs import Direction, Job

FORWARD, BACKWARD, WEIGHT = Direction
Kind = tuple[int, Direction]


class Event(NamedTuple):
    """A job that ran: on which worker, from when to when."""

    job: Job
    worker: int
    start: float
    end: float


@dataclass(frozen=True)
class Jobs:
    """The jobs of a step, by number.

    kinds: stage and direction of the jobs of one microbatch, in an order that breaks
        ties of n; a microbatch's jobs come before those of the next.
    preds: for each kind, the kinds that it waits for, of the same microbatch.
    weights, compute, n: the workers and the priority of each job.
    more: further successors of jobs, which nothing is sent to.
    """

    kinds: tuple[Kind, ...]
    preds: tuple[tuple[int, ...], ...]
    microbatches: int
    workers: int
    weights: Sequence[int]
    compute: Sequence[int]
    n: Sequence[int]
    more: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.compute)

    def job(self, number: int) -> Job:
        microbatch, kind = divmod(number, len(self.kinds))
        stage, direction = self.kinds[kind]
        return Job(stage, microbatch, direction)

    @cached_property
    def at(self) -> dict[Kind, int]:
        """The number of each kind."""
        return {kind: i for i, kind in enumerate(self.kinds)}

    def number(self, job: Job) -> int:
        kind = self.at[job.stage, job.direction]
        return job.microbatch * len(self.kinds) + kind

    def holders(self, release: Direction) -> dict[int, tuple[int, int]]:
        """By kind of F, the kinds of its B and of the job that lets go of what F
        saved: `release`, or B where a stage has none; for stages that have a B."""
        at = self.at
        return {
            at[s, FORWARD]: (b, at.get((s, release), b))
            for s, d in self.kinds
            if d is FORWARD and (b := at.get((s, BACKWARD), -1)) >= 0
        }


class Timeline(Sequence[Event]):
    """Jobs that ran, in the order in which they started; equal starts by worker.

    order: their numbers; start, end: when, in the unit of the durations.
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
        worker = self.jobs.compute[number]
        return Event(self.jobs.job(number), worker, self.start[index], self.end[index])

    def __iter__(self) -> Iterator[Event]:
        return (self[i] for i in range(len(self)))

    @property
    def complete(self) -> bool:
        """Whether all jobs ran; a cap may stop them."""
        return len(self.order) == len(self.jobs)


class Network:
    """What the loop asks of transfers; this one takes no time.

    Numbers are jobs, `now` is the time on the clock.
    """

    def arrival(self, maker: int, reader: int, now: float) -> float:
        """When what a job made that ended now is there for another worker's job."""
        return now

    def started(self, number: int, now: float) -> Iterable[tuple[int, float]]:
        """Jobs that wait for something which a job's start sets off, and its arrival;
        `waiting` has each of them. First of all it is asked of -1, at time 0."""
        return ()

    def ended(self, number: int, now: float) -> Iterable[tuple[int, float]]:
        """What to tell this network of, and when, after a job's end."""
        return ()

    def told(self, what: int, now: float) -> None:
        """What it asked for with `ended`."""

    waiting: Sequence[int] = ()  # jobs that something must arrive for


def run_jobs(
    jobs: Jobs,
    seconds: Sequence[float],
    cap: Callable[[int], int | None] = lambda stage: None,
    release: Direction = BACKWARD,
    network: Network | None = None,
    in_order: bool = False,
) -> Timeline:
    """Jobs in the order in which they start; not complete if the cap stops all.

    seconds: how long each job takes.
    cap: how many microbatches of a stage may be between F and `release` on the worker
        of B.
    in_order: a worker runs its jobs strictly by n.
    """
    K, W = len(jobs.kinds), jobs.workers
    compute = jobs.compute
    ranked = sorted(range(len(jobs)), key=jobs.n.__getitem__)
    rank = [0] * len(jobs)
    for r, j in enumerate(ranked):
        rank[j] = r
    succs: list[list[int]] = [[] for _ in range(K)]  # how far each one is
    for k, before in enumerate(jobs.preds):
        for p in before:
            succs[p].append(k - p)
    missing = [len(before) for before in jobs.preds] * jobs.microbatches
    for more in jobs.more.values():
        for j in more:
            missing[j] += 1
    for j in network.waiting if network else ():
        missing[j] += 1
    caps: list[int | None] = [None] * K  # of kinds F
    to_holder = [0] * K  # from F and from what lets go of its activations, to B
    frees = [False] * K  # what lets go of a capped F's activations
    for f, (b, last) in jobs.holders(release).items():
        caps[f] = cap(jobs.kinds[f][0])
        if caps[f] is not None:
            to_holder[f], to_holder[last] = b - f, b - last
            frees[last] = True

    ready: list[list[int]] = [[] for _ in range(W)]  # heaps of ranks
    lines: list[list[int]] = [[] for _ in range(W if in_order else 0)]
    for r, j in enumerate(ranked):
        if not missing[j]:
            ready[compute[j]].append(r)
        if in_order:
            lines[compute[j]].append(r)
    for line in lines:
        line.reverse()
    parked: dict[int, list[int]] = {}  # ranks of F that wait for room, by place
    held: dict[int, int] = {}
    free = [True] * W
    ends: list[tuple[float, int]] = []  # of jobs; of messages to j as -1 - j
    for t, when in network.started(-1, 0.0) if network else ():
        heappush(ends, (when, -1 - t))
    order: list[int] = []
    starts: list[float] = []
    finish: list[float] = []
    idle = set(range(W))
    now = 0.0
    while True:
        for w in sorted(idle):
            queue = ready[w]
            while queue and free[w]:
                if in_order and queue[0] != lines[w][-1]:
                    break
                r = heappop(queue)
                j = ranked[r]
                k = j % K
                limit = caps[k]
                if limit is not None:
                    b = j + to_holder[k]
                    place = (b % K) * W + compute[b]
                    if held.get(place, 0) >= limit:
                        heappush(parked.setdefault(place, []), r)
                        continue
                    held[place] = held.get(place, 0) + 1
                free[w] = False
                end = now + seconds[j]
                heappush(ends, (end, j))
                order.append(j)
                starts.append(now)
                finish.append(end)
                if in_order:
                    lines[w].pop()
                if network:
                    for t, when in network.started(j, now):
                        heappush(ends, (when, -1 - t))
        if not ends:
            return Timeline(jobs, order, starts, finish)
        now = ends[0][0]
        idle.clear()
        while ends and ends[0][0] == now:
            j = heappop(ends)[1]
            if j < 0:
                j = -1 - j
                if network and j >= len(jobs):
                    network.told(j - len(jobs), now)
                    continue
                missing[j] -= 1
                if not missing[j]:
                    w = compute[j]
                    heappush(ready[w], rank[j])
                    idle.add(w)
                continue
            k = j % K
            w = compute[j]
            free[w] = True
            idle.add(w)
            if frees[k]:
                b = j + to_holder[k]
                place = (b % K) * W + compute[b]
                held[place] -= 1
                if parked.get(place):
                    r = heappop(parked[place])
                    heappush(ready[compute[ranked[r]]], r)
                    idle.add(compute[ranked[r]])
            if jobs.more:
                for t in jobs.more.get(j, ()):
                    missing[t] -= 1
                    if not missing[t]:
                        heappush(ready[compute[t]], rank[t])
                        idle.add(compute[t])
            for t in map(j.__add__, succs[k]):
                if network and compute[t] != w:
                    when = network.arrival(j, t, now)
                    if when > now:
                        heappush(ends, (when, -1 - t))
                        continue
                left = missing[t] - 1
                missing[t] = left
                if not left:
                    heappush(ready[compute[t]], rank[t])
                    idle.add(compute[t])
            if network:
                for what, when in network.ended(j, now):
                    heappush(ends, (when, -1 - len(jobs) - what))
