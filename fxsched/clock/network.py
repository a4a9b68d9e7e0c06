"""Transfers that take time in a simulated step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx

from ..jobs.job import Direction, PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import is_number
from .event_loop import Network
from .stage_graph import Edges
from .timeline import Jobs, Timeline
from .weight_fetches import fetches
from .weight_traffic import stage_keepers, weight_size

FORWARD, BACKWARD, WEIGHT, _ = Direction


@dataclass(frozen=True)
class Link:
    """A link for each directed pair of workers: what is sent takes turns on it.

    bandwidth: bytes a second (or whatever unit the durations have).
    latency: time from the last byte's leaving to its arrival.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        numbers = is_number(self.bandwidth) and is_number(self.latency)
        if not numbers or not self.bandwidth > 0:
            raise PlanError(
                f"{self}: give a bandwidth above 0 and a latency of 0 or more"
            )


def check_transfer(call: str, transfer: object) -> None:
    """Raises PlanError for what is no time of messages. call: what it was given to."""
    if not (transfer is None or isinstance(transfer, Link) or is_number(transfer)):
        raise PlanError(
            f"{call}(transfer={transfer!r}): give a time of 0 or more, a Link, or None "
            "for the `seconds` of edges"
        )


class Transfers(Network):
    """Transfers that take a constant time, turns on the links between workers, or, for
    None, the `seconds` of edges and the `fetch` of stages.

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
        self.edges = Edges(jobs, stages) if transfer is None else None
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
            self._fetch(schedule, timeline, prefetch)
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
        if self.transfer is None:  # sizes are seconds
            return now + size
        if not isinstance(self.transfer, Link):
            return now + self.transfer
        gone = max(now, self.links.get((source, to), 0.0))
        gone += size / self.transfer.bandwidth
        self.links[source, to] = gone
        return gone + self.transfer.latency

    def arrival(self, maker: int, reader: int, now: float) -> float:
        """When the reader has what the maker sent at `now`."""
        if self.edges is not None:
            return self.edges.arrival(maker, reader, now)
        compute = self.jobs.compute
        source, to = compute[maker], compute[reader]
        (a, d), (b, _) = (self.jobs.kinds[i % self.width] for i in (maker, reader))
        key = (maker, -1 - to if d is FORWARD and a != b else reader)
        if key not in self.sent:
            if a == b:
                size = self.stages.nodes[a].get("held", 0.0)
            else:
                edge = self.stages.get_edge_data(min(a, b), max(a, b), {})
                size = edge.get("bytes", 0.0)
            self.sent[key] = self._send(source, to, size, now)
        return self.sent[key]

    def _weights(self, stage: int) -> float:
        if self.transfer is None:
            return float(self.stages.nodes[stage].get("fetch", 0.0))
        return weight_size(self.stages, stage)

    def _fetch(self, schedule: Schedule, timeline: Timeline, prefetch: int) -> None:
        """Notes which jobs' starts or ends set off which fetches."""
        numbers, _, fetched, origin = fetches(schedule, self.stages, timeline)
        self.origin = dict(zip(numbers.tolist(), origin.tolist(), strict=True))
        line: list[int] = []  # jobs of the worker so far
        worker = -1
        for number, missing in zip(numbers.tolist(), fetched.tolist(), strict=True):
            if self.jobs.compute[number] != worker:
                line, worker = [], self.jobs.compute[number]
            line.append(number)
            if missing:
                ahead = max(prefetch, 1)
                setter = line[-1 - ahead] if len(line) > ahead else -1
                self.asked.setdefault(setter, []).append((number, prefetch == 0))
                self.waiting.append(number)

    def started(self, number: int, now: float) -> Iterable[tuple[int, float]]:
        """What a job's start sends: jobs whose weights come, and when."""
        for wanted, at_end in self.asked.get(number, ()):
            when = now
            if at_end and number >= 0:
                when += self.ends[number] - self.starts[number]
            stage = self.jobs.kinds[wanted % self.width][0]
            source, to = self.origin[wanted], self.jobs.compute[wanted]
            yield wanted, self._send(source, to, self._weights(stage), when)

    def _return(self, timeline: Timeline, schedule: Schedule) -> None:
        """Notes the last job of each stage on each worker: its end sends gradients."""
        self.keepers = stage_keepers(schedule, self.jobs)
        lasts: dict[tuple[int, int], int] = {}
        for number in timeline.order:
            if number >= self.jobs.regular:
                continue
            stage, d = self.jobs.kinds[number % self.width]
            if d is schedule.release:
                lasts[stage, self.jobs.compute[number]] = number
        self.missing: dict[int, int] = {}
        for (stage, _), number in lasts.items():
            self.last[number] = stage
            self.missing[stage] = self.missing.get(stage, 0) + 1

    def ended(self, number: int, now: float) -> Iterable[tuple[int, float]]:
        """What a job's end sends: jobs that its gradients free, and when."""
        if number not in self.last:
            return
        stage = self.last[number]
        worker, root = self.jobs.compute[number], self.keepers[stage].root
        there = now
        if worker != root:
            there = self._send(worker, root, self._weights(stage), now)
        yield stage, there

    def told(self, what: int, now: float) -> None:
        """A sum of gradients is there; after the last one the total, or new weights, go
        to the other owners."""
        self.missing[what] -= 1
        self.returned = max(self.returned, now)
        if not self.missing[what]:
            size = self._weights(what)
            owners, root, _ = self.keepers[what]
            for owner in owners:
                if owner != root:
                    there = self._send(root, owner, size, now)
                    self.returned = max(self.returned, there)
