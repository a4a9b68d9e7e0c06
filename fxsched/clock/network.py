"""Transfers that take time in a simulated step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import networkx as nx

from ..jobs.job import Direction, PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import is_number
from .event_loop import Network
from .jobs import Jobs
from .stage_graph import Edges, edge_between, is_whole
from .timeline import Timeline
from .update_messages import Renewal, Sum, gradient_sums, renewals
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
    and gradients are returned: updates wait for these, and jobs that read what updates
    make, from a copy or by a fetch, wait for that.
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
        self.links: dict[tuple[int, int], float] = {}  # when each is free again
        self.sent: dict[tuple[int, int], float] = {}  # arrivals of what goes once
        self.missing: dict[tuple[int, int, int], int] = {}  # of what is added up first
        self.returned = 0.0
        self.asked: dict[int, list[tuple[int, bool]]] = {}  # by what sets it off
        self.waiting: list[int] = []
        self.notes: list[Sum | Renewal] = []  # what `told` is told of, by place
        self.last: dict[int, int] = {}  # places of sums, by the jobs that end them
        self.new: dict[int, list[int]] = {}  # of renewals, by their updates
        # when what is fetched after an update was new, or asked for: the first of both
        self.first: dict[int, float | None] = {}
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
        """0 if all readers of a job read the same of it; of a joint one each microbatch
        may read its rows."""
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
            if self.jobs.worker[number] != worker:
                line, worker = [], self.jobs.worker[number]
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
            yield from self._ask(wanted, when)

    def _ask(self, wanted: int, when: float) -> Iterator[tuple[int, float]]:
        """Sends weights that a job fetches; after an update, at the later of two."""
        if wanted in self.first:
            first = self.first[wanted]
            if first is None:
                self.first[wanted] = when
                return
            when = max(first, when)
        stage = self.jobs.kinds[self.jobs.kind[wanted]][0]
        source, to = self.origin[wanted], self.jobs.worker[wanted]
        yield wanted, self._send(source, to, self._weights(stage), when)

    def _return(self, timeline: Timeline, schedule: Schedule) -> None:
        """Notes the last job of each stage on each worker before an update, whose end
        sends gradients, and what becomes of the weights that updates make."""
        self.keepers = stage_keepers(schedule, self.jobs)
        sums, self.last = gradient_sums(schedule, timeline, self.jobs)
        self.notes += sums
        fetched = {number: self.origin[number] for number in self.waiting}
        for renewal in renewals(self.jobs, self.keepers, fetched):
            self.new.setdefault(renewal.update, []).append(len(self.notes))
            self.first |= dict.fromkeys(renewal.fetched)
            self.notes.append(renewal)
        self.waiting += [number for note in self.notes for number in note.frees]

    def ended(self, number: int, now: float) -> Iterable[tuple[int, float]]:
        """What a job's end sends: places of notes, and when it is there."""
        here = self.jobs.worker[number]
        if number in self.last:
            place = self.last[number]
            stage = self.notes[place].stage
            root = self.keepers[stage].root
            yield place, self._weights_to(here, root, stage, now)
        for place in self.new.get(number, ()):
            note = self.notes[place]
            assert isinstance(note, Renewal)
            yield place, self._weights_to(here, note.owner, note.stage, now)

    def _weights_to(self, source: int, to: int, stage: int, now: float) -> float:
        """When a stage's weights, or gradients of them, are there."""
        if source == to:
            return now
        return self._send(source, to, self._weights(stage), now)

    def told(self, what: int, now: float) -> Iterable[tuple[int, float]]:
        """A sum of gradients, or new weights, are there; gives the jobs that this
        frees, and when."""
        self.returned = max(self.returned, now)
        note = self.notes[what]
        if isinstance(note, Sum):
            note.missing -= 1
            return () if note.missing else self._total(note, now)
        asked = (each for job in note.fetched for each in self._ask(job, now))
        return [*((job, now) for job in note.frees), *asked]

    def _total(self, note: Sum, now: float) -> list[tuple[int, float]]:
        """The total goes to the updates that wait for it, or, if the loop has these, to
        the other owners, as new weights do."""
        owners, root, alone = self.keepers[note.stage]
        workers = [self.jobs.worker[update] for update in note.frees]
        first = [] if alone and workers else owners  # they get what the update makes
        there = {
            worker: self._weights_to(root, worker, note.stage, now)
            for worker in dict.fromkeys([*first, *workers])
        }
        self.returned = max(self.returned, *there.values())
        return [(j, there[w]) for j, w in zip(note.frees, workers, strict=True)]
