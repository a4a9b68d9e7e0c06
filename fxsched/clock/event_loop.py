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
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from ..jobs.job import Direction
from .activations import lifetimes, to_holder
from .timeline import Jobs, Timeline


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

    def told(self, what: int, now: float) -> Iterable[tuple[int, float]]:
        """What it asked for with `ended`; gives jobs that wait for it, and its arrival
        there. `waiting` has each of them."""
        return ()

    waiting: Sequence[int] = ()  # jobs that something must arrive for


class _Precedence(NamedTuple):
    """What jobs wait for."""

    succs: list[list[int]]  # by kind: how far it is to successors of its microbatch
    missing: list[int]  # by job: how many predecessors and messages are to come


class _Caps(NamedTuple):
    """How many microbatches may be in flight, and where that is counted."""

    limit: list[int | None]  # by kind of F, at the worker of its B
    to_holder: list[int]  # see activations
    releases: list[bool]  # by kind: whether its end makes room for a capped F


class _Queues(NamedTuple):
    """Ranks of jobs by worker. A rank is a job's place by n, ties by number."""

    ranked: list[int]  # the job of each rank
    rank: list[int]  # the rank of each job
    ready: list[list[int]]  # heaps: jobs that nothing is missing for
    strict: list[list[int]]  # if in_order: those to come, the next one last


def _precedence(jobs: Jobs, network: Network | None) -> _Precedence:
    succs: list[list[int]] = [[] for _ in jobs.kinds]
    for kind, before in enumerate(jobs.preds):
        for p in before:
            if jobs.joint.isdisjoint((kind, p)):  # jobs.met has the others
                succs[p].append(kind - p)
    succs.append([])  # of updates: jobs.more has theirs
    missing = jobs.waited_for() + [0] * len(jobs.updates)
    for more in jobs.more.values():
        for j in more:
            missing[j] += 1
    for j in network.waiting if network else ():
        missing[j] += 1
    return _Precedence(succs, missing)


def _caps(jobs: Jobs, cap: Callable[[int], int | None], release: Direction) -> _Caps:
    limits: list[int | None] = [None] * (len(jobs.kinds) + 1)  # the last of updates
    releases = [False] * (len(jobs.kinds) + 1)
    for life in lifetimes(jobs, release):
        limit = cap(jobs.kinds[life.forward][0])
        limits[life.forward], releases[life.release] = limit, limit is not None
    return _Caps(limits, to_holder(jobs, release), releases)


def _queues(jobs: Jobs, missing: Sequence[int], in_order: bool) -> _Queues:
    ranked = sorted(range(len(jobs)), key=jobs.n.__getitem__)
    rank = [0] * len(jobs)
    ready: list[list[int]] = [[] for _ in range(jobs.workers)]
    strict: list[list[int]] = [[] for _ in range(jobs.workers if in_order else 0)]
    for r, j in enumerate(ranked):
        rank[j] = r
        if not missing[j]:
            ready[jobs.compute[j]].append(r)  # in rising order, which is a heap
        if in_order and not (jobs.joint and jobs.unused(j)):
            strict[jobs.compute[j]].append(r)
    for line in strict:
        line.reverse()
    return _Queues(ranked, rank, ready, strict)


class _Simulation:
    """What changes while jobs run, beside what doesn't.

    calendar: the future events, a heap by time: of j < N, its end; of -1 - j, a message
        for j; of -1 - N - x, x told to the network.
    candidates: workers that may have something new to start.
    in_flight, parked: by kind and worker of B, how many microbatches are there and, in
        heaps, the F that wait for one to leave.
    """

    def __init__(
        self, jobs: Jobs, caps: _Caps, network: Network | None, in_order: bool
    ) -> None:
        self.jobs, self.caps, self.network = jobs, caps, network
        self.more = jobs.more if network else jobs.met_or_more
        self.succs, self.missing = _precedence(jobs, network)
        self.queues = _queues(jobs, self.missing, in_order)
        self.free = [True] * jobs.workers
        self.candidates = set(range(jobs.workers))
        self.in_flight: dict[int, int] = defaultdict(int)
        self.parked: dict[int, list[int]] = defaultdict(list)
        self.calendar: list[tuple[float, int]] = []
        for j, when in network.started(-1, 0.0) if network else ():
            heappush(self.calendar, (when, -1 - j))


def run_jobs(
    jobs: Jobs,
    seconds: Sequence[float],
    cap: Callable[[int], int | None] = lambda stage: None,
    release: Direction = Direction.BACKWARD,
    network: Network | None = None,
    in_order: bool = False,
) -> Timeline:
    """Jobs in the order in which they start; not complete if the cap stops all.

    seconds: how long each job takes.
    cap: how many microbatches of a stage may be between F and `release` on the worker
        of B.
    in_order: a worker runs its jobs strictly by n.
    """
    simulation = _Simulation(jobs, _caps(jobs, cap, release), network, in_order)
    order, starts = _run(simulation, seconds)
    ends = [start + seconds[j] for start, j in zip(starts, order, strict=True)]
    return Timeline(jobs, order, starts, ends)


# What is called once for each time on the clock is a closure, and all else is in line:
# a call for each of a million events is felt, and so is a look at an attribute.


def _run(
    simulation: _Simulation, seconds: Sequence[float]
) -> tuple[list[int], list[float]]:
    """The jobs in the order in which they start, and when."""
    jobs, network = simulation.jobs, simulation.network
    K, W, U, compute = len(jobs.kinds), jobs.workers, jobs.regular, jobs.compute
    calendar, candidates = simulation.calendar, simulation.candidates
    ranked, _, ready, strict = simulation.queues
    limits, to_holder, _ = simulation.caps
    free, in_flight, parked = simulation.free, simulation.in_flight, simulation.parked
    advance = _bound_events(simulation)
    order: list[int] = []
    starts: list[float] = []
    now = 0.0
    while True:
        # C: each free worker starts its first ready job, but for those that caps park
        for w in sorted(candidates) if len(candidates) > 1 else candidates:
            queue = ready[w]
            while queue and free[w]:
                if strict and queue[0] != strict[w][-1]:
                    break
                r = heappop(queue)
                j = ranked[r]
                k = j % K if j < U else K
                limit = limits[k]
                if limit is not None:
                    b = j + to_holder[k]
                    place = b % K * W + compute[b]
                    if in_flight[place] >= limit:
                        heappush(parked[place], r)
                        continue
                    in_flight[place] += 1
                if strict:
                    strict[w].pop()
                free[w] = False
                order.append(j)
                starts.append(now)
                heappush(calendar, (now + seconds[j], j))
                if network:
                    for t, when in network.started(j, now):
                        heappush(calendar, (when, -1 - t))
        if not calendar:
            return order, starts
        now = advance()


def _bound_events(simulation: _Simulation) -> Callable[[], float]:
    """Phases A and B: the clock advances to the time that is returned; what is due then
    happens. Jobs that then miss nothing are ready, their workers candidates."""
    jobs, network, free = simulation.jobs, simulation.network, simulation.free
    K, W, U, compute = len(jobs.kinds), jobs.workers, jobs.regular, jobs.compute
    ranked, rank, ready, _ = simulation.queues
    _, to_holder, releases = simulation.caps
    succs, missing, more = simulation.succs, simulation.missing, simulation.more
    in_flight, parked = simulation.in_flight, simulation.parked
    calendar, candidates = simulation.calendar, simulation.candidates
    told, send = _messages(simulation)

    def advance() -> float:
        candidates.clear()
        now = calendar[0][0]
        arrived: list[int] = []  # jobs, once for each thing that they waited for
        while calendar and calendar[0][0] == now:
            j = heappop(calendar)[1]
            if j < 0:
                told(j, now, arrived)
                continue
            k = j % K if j < U else K
            w = compute[j]
            free[w] = True
            candidates.add(w)
            if releases[k]:
                b = j + to_holder[k]
                place = b % K * W + compute[b]
                in_flight[place] -= 1
                if parked[place]:
                    r = heappop(parked[place])
                    heappush(ready[compute[ranked[r]]], r)
                    candidates.add(compute[ranked[r]])
            if more:
                arrived += more.get(j, ())
            if network:
                send(j, now, arrived)
                continue
            for distance in succs[k]:
                arrived.append(j + distance)
        for j in arrived:
            left = missing[j] = missing[j] - 1
            if not left:
                w = compute[j]
                heappush(ready[w], rank[j])
                if free[w]:
                    candidates.add(w)
        return now

    return advance


_Messages = Callable[[int, float, list[int]], None]


def _messages(simulation: _Simulation) -> tuple[_Messages, _Messages]:
    """What a message's event does, and what the end of a job sends off; both add jobs
    for which something has arrived to a list."""
    jobs, calendar, succs = simulation.jobs, simulation.calendar, simulation.succs
    K, N, U, compute = len(jobs.kinds), len(jobs), jobs.regular, jobs.compute
    network = simulation.network or Network()
    arrival, ended, met = network.arrival, network.ended, jobs.met

    def told(message: int, now: float, arrived: list[int]) -> None:
        if -1 - message < N:
            arrived.append(-1 - message)
        else:
            for j, when in network.told(-1 - message - N, now):
                heappush(calendar, (when, -1 - j))

    def send(j: int, now: float, arrived: list[int]) -> None:
        here = compute[j]
        after = succs[j % K if j < U else K]
        if met:
            after = [*after, *(t - j for t in met.get(j, ()))]
        for distance in after:
            t = j + distance
            when = now if compute[t] == here else arrival(j, t, now)
            if when > now:
                heappush(calendar, (when, -1 - t))
            else:
                arrived.append(t)
        for what, when in ended(j, now):
            heappush(calendar, (when, -1 - N - what))

    return told, send
