"""Transfers that take time in a simulated step."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from ..jobs.job import Direction, PlanError
from ..jobs.user_values import is_number
from .event_loop import Network
from .jobs import Jobs
from .stage_graph import edge_between, is_whole

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
    """Transfers that take a constant time, or turns on the links between workers."""

    def __init__(
        self, stages: nx.DiGraph[int], jobs: Jobs, transfer: float | Link
    ) -> None:
        self.jobs, self.stages, self.transfer = jobs, stages, transfer
        self.links: dict[tuple[int, int], float] = {}  # when each is free again
        self.sent: dict[tuple[int, int], float] = {}  # arrivals of what goes once
        self.missing: dict[tuple[int, int, int], int] = {}  # of what is added up first
        if isinstance(transfer, Link):
            self._check()

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
            return now + self.transfer
        gone = max(now, self.links.get((source, to), 0.0))
        gone += size / self.transfer.bandwidth
        self.links[source, to] = gone
        return gone + self.transfer.latency

    def arrival(self, maker: int, reader: int, now: float) -> float:
        """When the reader has what the maker sent at `now`."""
        jobs = self.jobs
        source, to = jobs.worker[maker], jobs.worker[reader]
        (a, d), (b, _) = (jobs.kinds[jobs.kind[i]] for i in (maker, reader))
        if self._adds_up(maker, reader):
            return now
        once = d is FORWARD and a != b
        key = (maker, -1 - to - self._part(maker, reader) if once else reader)
        if key not in self.sent:
            if a == b:
                size = self.stages.nodes[a].get("held", 0.0)
            else:
                edge = edge_between(self.stages, a, b) or {}
                size = edge.get("bytes", 0.0)
            self.sent[key] = self._send(source, to, size, now)
        return self.sent[key]

    def _part(self, maker: int, reader: int) -> int:
        """0 if all readers of a job read the same of it; of a global-batch one each
        microbatch may read its rows."""
        jobs = self.jobs
        one, other = jobs.kind[maker], jobs.kind[reader]
        if one not in jobs.joint or other in jobs.joint:
            return 0
        if is_whole(self.stages, jobs, one, other):
            return 0
        return (1 + jobs.rows[reader]) * jobs.workers

    def _adds_up(self, maker: int, reader: int) -> bool:
        """Whether its worker adds a job's gradient to others before it is sent, which
        the last one does."""
        jobs, kind = self.jobs, self.jobs.kind[maker]
        if kind in jobs.joint or jobs.kind[reader] not in jobs.joint:
            return False
        if not is_whole(self.stages, jobs, kind, jobs.kind[reader]):
            return False
        worker = jobs.worker[maker]
        key = kind, reader, worker
        if key not in self.missing:
            every = [jobs.worker[number] for number in jobs.of(kind)]
            self.missing[key] = every.count(worker)
        self.missing[key] -= 1
        return self.missing[key] > 0
