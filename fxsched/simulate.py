"""Simulates a schedule on stages, without a model: times, transfers and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import networkx as nx
import numpy as np

from . import show
from .eventloop import Jobs, Network, Timeline, run_jobs
from .jobs import Direction, Job, PlanError, Schedule
from .stages import Edges, Worker, kind_seconds, peaks, stage_jobs

FORWARD, BACKWARD, WEIGHT = Direction
Durations = Mapping[str, float] | Callable[[Job], float] | None
UNITS = MappingProxyType({"F": 1.0, "B": 2.0})


@dataclass(frozen=True)
class Link:
    """A link for each directed pair of workers: what is sent takes turns on it.

    bandwidth: bytes a second (or whatever unit the durations have).
    latency: time from the last byte's leaving to its arrival.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not self.latency >= 0:
            raise PlanError(
                f"{self}: give a bandwidth above 0 and a latency of 0 or more"
            )


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    latency: from the first start to the last end (of a returned gradient too, if
        those take time), in the unit of the durations.
    workers: a record for each.
    timeline: every job with its worker, start and end.
    """

    schedule: Schedule
    stages: nx.DiGraph[int]
    latency: float
    workers: tuple[Worker, ...]
    timeline: Timeline

    @property
    def throughput(self) -> float:
        """Jobs per unit of time and worker."""
        return len(self.timeline) / (self.latency or 1.0) / len(self.workers)

    @property
    def bubble_rate(self) -> float:
        """The share of the workers' time that they are idle."""
        return self._idle(self.latency)

    @property
    def span_bubble_rate(self) -> float:
        """The same, where one step follows the other: of the longest span."""
        return self._idle(self.span)

    def _idle(self, time: float) -> float:
        busy = sum(worker.busy for worker in self.workers)
        return 1.0 - busy / (time * len(self.workers)) if time else 0.0

    @cached_property
    def span(self) -> float:
        """The longest time from a worker's first start to its last end: what a step
        costs where the next begins on each worker as soon as it is done."""
        compute = np.asarray(self.timeline.jobs.compute)[self.timeline.order]
        first = np.full(len(self.workers), np.inf)
        last = np.full(len(self.workers), -np.inf)
        np.minimum.at(first, compute, self.timeline.start)
        np.maximum.at(last, compute, self.timeline.end)
        return float(max((last - first).max(), 0.0))

    def table(self) -> str:
        """A line about the step, and a row for each worker; equal ones share a row."""
        line = (
            f"{self.schedule}, {len(self.stages)} stages: step {self.latency:.4g}, "
            f"bubble {100 * self.bubble_rate:.1f} %, "
            f"throughput {self.throughput:.3f}"
        )
        return f"{line}\n\n{show.worker_table(self.workers, self.latency)}"

    def __str__(self) -> str:
        return self.table()


def simulate(
    schedule: Schedule,
    stages: int | nx.DiGraph[int] | None = None,
    durations: Durations = UNITS,
    transfer: float | Link | None = 0.0,
    prefetch: int | None = None,
) -> Simulation:
    """Runs a schedule on a virtual clock.

    stages: how many, in a chain, or a networkx.DiGraph of them, numbered from 0 in the
        order of data flow; the schedule's own number unless given, or, where that is
        open too, one for each worker.
    durations: of F, B and (if the schedule splits the backward; half of B each unless
        given) W, as {"F": 1, "B": 2}; or a function of the job; or None for those of
        the stages, as fxsched/stages.py describes them.
    transfer: how long what a job made takes to a job on another worker; a Link, for
        stages whose edges have `bytes`; or None for the `seconds` of the edges.
    prefetch: None if fetching weights and returning their gradients takes no time;
        else how many jobs ahead of need a worker asks for weights. They take
        `transfer`, or on a Link half of a stage's `weights`, which count gradients too.
    Raises PlanError for what cannot be simulated, and for a cap that stops all.
    """
    graph = _stages(schedule, stages)
    if durations is not None and not callable(durations):
        _set_durations(graph, durations)
    elif callable(durations):
        for s, data in graph.nodes(data=True):
            data["forward"] = durations(Job(s, 0, FORWARD))
            data["backward"] = sum(
                durations(Job(s, 0, d)) for d in schedule.directions[1:]
            )
    schedule = schedule.fitted(graph)
    jobs = stage_jobs(schedule, graph)
    seconds = kind_seconds(schedule, graph, jobs.kinds) * jobs.microbatches
    if callable(durations):
        seconds = [durations(jobs.job(i)) for i in range(len(jobs))]
    return run(schedule, graph, jobs, seconds, transfer, prefetch)


def run(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    jobs: Jobs,
    seconds: Sequence[float],
    transfer: float | Link | None = 0.0,
    prefetch: int | None = None,
) -> Simulation:
    """Simulates jobs that are made already; see simulate."""
    bad = next((i for i, time in enumerate(seconds) if not time >= 0), None)
    if bad is not None:
        raise PlanError(
            f"durations: {jobs.job(bad)} takes {seconds[bad]!r}; give 0 or more"
        )
    network: Network | None = None
    if transfer is None:
        network = Edges(jobs, stages)
    elif isinstance(transfer, Link) or transfer:
        network = _Transfers(schedule, stages, jobs, transfer)

    def step(network: Network | None, in_order: bool) -> Timeline:
        cap = schedule.cap
        return run_jobs(jobs, seconds, cap, schedule.release, network, in_order)

    timeline = step(network, schedule.in_order)
    if not timeline.complete:
        done = set(timeline.order)
        waiting = next(i for i in range(len(jobs)) if i not in done)
        raise PlanError(
            f"in_flight or in_order stops {schedule}: {jobs.job(waiting)} never runs; "
            "allow more microbatches in flight, or give n the order of data flow"
        )
    latency = max(timeline.end, default=0.0)
    if prefetch is not None and isinstance(network, _Transfers):
        # the order is known now: the same jobs in it, and weights asked for ahead
        position = {number: i for i, number in enumerate(timeline.order)}
        jobs = replace(jobs, n=[position[i] for i in range(len(jobs))])
        fetching = _Transfers(schedule, stages, jobs, transfer, timeline, prefetch)
        timeline = step(fetching, in_order=True)
        latency = max(*timeline.end, fetching.returned)
    return Simulation(
        schedule, stages, latency, _workers(schedule, stages, timeline), timeline
    )


def _stages(
    schedule: Schedule, stages: int | nx.DiGraph[int] | None
) -> nx.DiGraph[int]:
    """A graph of the stages that simulate may write into."""
    if isinstance(stages, nx.DiGraph):
        if sorted(stages) != list(range(len(stages))) or not len(stages):
            raise PlanError(
                f"simulate(stages=): its nodes are {sorted(stages)[:5]}; number the "
                "stages from 0"
            )
        for a, b in stages.edges:
            if a >= b:
                raise PlanError(
                    f"simulate(stages=): stage {b} reads stage {a}, which has no "
                    "smaller number; number the stages in the order of data flow"
                )
        return stages.copy()
    count = stages
    if count is None:
        count = schedule.stages or schedule.workers
    if not isinstance(count, int) or count < 1:
        raise PlanError(
            f"simulate(stages={count!r}): give an int of 1 or more, or a "
            "networkx.DiGraph"
        )
    chain: nx.DiGraph[int] = nx.DiGraph()
    chain.add_nodes_from(range(count))
    nx.add_path(chain, range(count))
    return chain


def _set_durations(stages: nx.DiGraph[int], durations: Mapping[str, float]) -> None:
    if not {"F", "B"} <= set(durations) <= {"F", "B", "W"}:
        raise PlanError(
            f"simulate(durations={dict(durations)}): give times of F, B and, if B is "
            'split, W, as {"F": 1, "B": 2}'
        )
    for _, data in stages.nodes(data=True):
        data.pop("weight", None)
        data["forward"], data["backward"] = durations["F"], durations["B"]
        if "W" in durations:
            data["backward"] += durations["W"]
            data["weight"] = durations["W"]


class _Transfers(Network):
    """Transfers that take a constant time, or turns on the links between workers.

    With a timeline, weights are fetched in its order, `prefetch` jobs ahead of need,
    and gradients are returned.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: nx.DiGraph[int],
        jobs: Jobs,
        transfer: float | Link | None,
        timeline: Timeline | None = None,
        prefetch: int = 0,
    ) -> None:
        self.jobs, self.stages, self.transfer = jobs, stages, transfer
        self.width = len(jobs.kinds)
        self.links: dict[tuple[int, int], float] = {}  # when each is free again
        self.sent: dict[tuple[int, int], float] = {}  # arrivals of what goes once
        self.returned = 0.0
        self.asked: dict[int, list[tuple[int, bool]]] = {}  # by what sets it off
        self.waiting: list[int] = []
        self.last: dict[int, int] = {}  # stage, of a worker's last job of it
        if isinstance(transfer, Link):
            self._check()
        if timeline is not None:
            self.ends = dict(zip(timeline.order, timeline.end, strict=True))
            self.starts = dict(zip(timeline.order, timeline.start, strict=True))
            self._fetch(timeline, prefetch)
            self._return(timeline, schedule)

    def _check(self) -> None:
        for a, b, data in self.stages.edges(data=True):
            if "bytes" not in data:
                raise PlanError(
                    f"simulate(transfer=Link): the edge of stages from {a} to {b} has "
                    "no `bytes`; give a networkx.DiGraph whose edges have them"
                )

    def _send(self, source: int, to: int, size: float, now: float) -> float:
        """When a message that leaves now, or when its link is free, is there."""
        if not isinstance(self.transfer, Link):
            return now + float(self.transfer or 0.0)
        gone = max(now, self.links.get((source, to), 0.0))
        gone += size / self.transfer.bandwidth
        self.links[source, to] = gone
        return gone + self.transfer.latency

    def arrival(self, maker: int, reader: int, now: float) -> float:
        compute = self.jobs.compute
        source, to = compute[maker], compute[reader]
        (a, d), (b, _) = (self.jobs.kinds[i % self.width] for i in (maker, reader))
        key = (maker, -1 - to if d is FORWARD and a != b else reader)
        if key not in self.sent:
            size = self._held(a) if a == b else self._crosses(min(a, b), max(a, b))
            self.sent[key] = self._send(source, to, size, now)
        return self.sent[key]

    def _held(self, stage: int) -> float:
        return float(self.stages.nodes[stage].get("held", 0.0))

    def _crosses(self, a: int, b: int) -> float:
        return float(self.stages.get_edge_data(a, b, {}).get("bytes", 0.0))

    def _weights(self, stage: int) -> float:
        return float(self.stages.nodes[stage].get("weights", 0.0)) / 2

    def _fetch(self, timeline: Timeline, prefetch: int) -> None:
        """Notes which jobs' starts or ends set off which fetches."""
        numbers, _, fetches = _fetches(self.stages, timeline)
        line: list[int] = []  # jobs of the worker so far
        worker = -1
        for number, fetch in zip(numbers.tolist(), fetches.tolist(), strict=True):
            if self.jobs.compute[number] != worker:
                line, worker = [], self.jobs.compute[number]
            line.append(number)
            if fetch:
                ahead = max(prefetch, 1)
                setter = line[-1 - ahead] if len(line) > ahead else -1
                self.asked.setdefault(setter, []).append((number, prefetch == 0))
                self.waiting.append(number)

    def started(self, number: int, now: float) -> Iterable[tuple[int, float]]:
        for wanted, at_end in self.asked.get(number, ()):
            when = now
            if at_end and number >= 0:
                when += self.ends[number] - self.starts[number]
            stage = self.jobs.kinds[wanted % self.width][0]
            source, to = self.jobs.weights[wanted], self.jobs.compute[wanted]
            yield wanted, self._send(source, to, self._weights(stage), when)

    def _return(self, timeline: Timeline, schedule: Schedule) -> None:
        """Notes the last job of each stage on each worker: its end sends gradients."""
        self.owners = _owners(self.jobs)
        lasts: dict[tuple[int, int], int] = {}
        for number in timeline.order:
            stage, d = self.jobs.kinds[number % self.width]
            if d is schedule.release:
                lasts[stage, self.jobs.compute[number]] = number
        self.missing: dict[int, int] = {}
        for (stage, _), number in lasts.items():
            self.last[number] = stage
            self.missing[stage] = self.missing.get(stage, 0) + 1
        self.summed = dict.fromkeys(self.missing, 0.0)

    def ended(self, number: int, now: float) -> None:
        if number not in self.last:
            return
        stage = self.last[number]
        worker, owners = self.jobs.compute[number], self.owners[stage]
        root, size = owners[stage % len(owners)], self._weights(stage)
        there = now if worker == root else self._send(worker, root, size, now)
        self.summed[stage] = max(self.summed[stage], there)
        self.missing[stage] -= 1
        self.returned = max(self.returned, there)
        if not self.missing[stage]:
            for owner in owners:
                if owner != root:
                    there = self._send(root, owner, size, self.summed[stage])
                    self.returned = max(self.returned, there)


def _owners(jobs: Jobs) -> dict[int, list[int]]:
    """The workers that keep the weights of each stage."""
    found: dict[int, list[int]] = {}
    width = len(jobs.kinds)
    for stage in sorted({s for s, _ in jobs.kinds}):
        kinds = [k for k, (s, _) in enumerate(jobs.kinds) if s == stage]
        found[stage] = sorted({w for k in kinds for w in jobs.weights[k::width]})
    return found


def _fetches(stages: nx.DiGraph[int], timeline: Timeline) -> tuple[Any, Any, Any]:
    """The jobs of worker 0 in their order, then those of worker 1 and so on; whether
    each reads weights kept elsewhere; whether it has to fetch them."""
    jobs = timeline.jobs
    order = np.asarray(timeline.order, int)
    compute = np.asarray(jobs.compute, int)
    order = order[np.argsort(compute[order], kind="stable")]
    kind = order % len(jobs.kinds)
    reads = np.array(
        [
            d in stages.nodes[s].get("reads", (FORWARD, BACKWARD))
            and stages.nodes[s].get("weights", 1) != 0
            for s, d in jobs.kinds
        ],
        bool,
    )
    source, here = np.asarray(jobs.weights, int)[order], compute[order]
    stage = np.array([s for s, _ in jobs.kinds], int)[kind]
    away = reads[kind] & (source != here)
    same = np.zeros(len(order), bool)
    same[1:] = (
        away[:-1]
        & (here[1:] == here[:-1])
        & (source[1:] == source[:-1])
        & (stage[1:] == stage[:-1])
    )
    return order, away, away & ~same


def _workers(
    schedule: Schedule, stages: nx.DiGraph[int], timeline: Timeline
) -> tuple[Worker, ...]:
    jobs, count = timeline.jobs, schedule.workers
    compute = np.asarray(jobs.compute, int)
    order = np.asarray(timeline.order, int)
    times = np.asarray(timeline.end) - np.asarray(timeline.start)
    busy = np.bincount(compute[order], times, count)
    ones = peaks(timeline, schedule.release, [1.0] * len(jobs.kinds))
    sizes: list[float] | list[None] = [None] * count
    if all("held" in data for _, data in stages.nodes(data=True)):
        held = [stages.nodes[s]["held"] for s, _ in jobs.kinds]
        sizes = peaks(timeline, schedule.release, held)
    numbers, away, fetches = _fetches(stages, timeline)
    here = compute[numbers]
    owners = _owners(jobs)
    kept = np.bincount([w for found in owners.values() for w in found], None, count)
    received, sent = _messages(jobs)
    returned = np.zeros(count, int)
    for k, (stage, d) in enumerate(jobs.kinds):
        if d is schedule.release:
            root = owners[stage][stage % len(owners[stage])]
            workers = np.unique(compute[k :: len(jobs.kinds)])
            returned[workers[workers != root]] += 1
    columns = (
        busy.tolist(),
        map(int, ones),
        sizes,
        kept.tolist(),
        np.bincount(here[fetches], None, count).tolist(),
        np.bincount(here[away], None, count).tolist(),
        received.tolist(),
        sent.tolist(),
        returned.tolist(),
    )
    return tuple(Worker(*row) for row in zip(*columns, strict=True))


def _messages(jobs: Jobs) -> tuple[Any, Any]:
    """How many messages between jobs each worker receives and sends: one for each job
    and other worker that reads what it made."""
    width, count = len(jobs.kinds), jobs.workers
    compute = np.asarray(jobs.compute, int)
    readers: list[list[int]] = [[] for _ in range(width)]
    for k, before in enumerate(jobs.preds):
        for p in before:
            readers[p].append(k)
    received, sent = np.zeros(count, int), np.zeros(count, int)
    for p, reading in enumerate(readers):
        if not reading:
            continue
        source = compute[p::width]
        to = np.sort(np.stack([compute[k::width] for k in reading], 1), 1)
        new = to != source[:, None]
        new[:, 1:] &= to[:, 1:] != to[:, :-1]
        received += np.bincount(to[new], None, count)
        sent += np.bincount(source, new.sum(1), count).astype(int)
    return received, sent
