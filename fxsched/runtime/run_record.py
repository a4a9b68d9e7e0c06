"""What a run notes of its jobs and messages for the flight record."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..clock.timeline import Event
from ..transport.endpoints import Endpoint, Where
from ..transport.wire_format import Parcel
from .record import Entry
from .tasks import TaskProgram

clock = time.perf_counter


class Wait(NamedTuple):
    """A wait since then: for a message, or for any, of which `where` says more."""

    began: float
    parcel: Parcel | None = None
    where: Where | None = None


@dataclass
class RunRecord:
    """A run's jobs and messages, on time.perf_counter().

    events: jobs that ran. messages: "sent" or "took", what, from when to when.
    wait: the present one. task, error: where the run failed, and with what, if it did.
    """

    worker: int
    program: TaskProgram
    events: list[Event] = field(default_factory=list)
    messages: list[tuple[str, Parcel, float, float]] = field(default_factory=list)
    wait: Wait | None = None
    task: str = ""
    error: str = ""

    def waiting(self) -> tuple[int | None, str]:
        """The peer, if it is known, and the task that it waits for."""
        if self.wait is None:
            return None, ""
        if self.wait.where is not None:
            peer, job = self.wait.where()
            return peer, job.removeprefix("job ")
        parcel = self.wait.parcel
        assert parcel is not None, "a wait is for a message or for any"
        slots = {r.slot for r in self.program.receives if r.parcel is parcel}
        tasks = (task for phase in self.program.phases for task in phase)
        name = next((t.name for t in tasks if not slots.isdisjoint(t.needs)), "")
        return parcel.peer, name

    def entries(self, call: int, shift: float) -> Iterator[Entry]:
        """All of it, with times moved by `shift`."""
        for job, _, start, end in self.events:
            yield Entry(call, "ran", start + shift, end + shift, str(job))
        for what, parcel, start, end in self.messages:
            size = sum(spec.bytes for spec in parcel.specs)
            peer = parcel.peer
            yield Entry(call, what, start + shift, end + shift, "", peer, size)


class RecordedEndpoint:
    """An endpoint whose messages are noted."""

    def __init__(self, endpoint: Endpoint, record: RunRecord) -> None:
        self.endpoint, self.record = endpoint, record
        self.expect, self.watch = endpoint.expect, endpoint.watch
        self.finish, self.share = endpoint.finish, endpoint.share
        self.fail = endpoint.fail

    def send(self, value: Any, parcel: Parcel) -> None:
        self.endpoint.send(value, parcel)
        now = clock()
        self.record.messages.append(("sent", parcel, now, now))

    def take(self, parcel: Parcel) -> Any:
        began = clock()
        self.record.wait = Wait(began, parcel)
        value = self.endpoint.take(parcel)
        self.record.messages.append(("took", parcel, began, clock()))
        self.record.wait = None
        return value

    def next(self, arrived: queue.SimpleQueue[int], where: Where) -> int:
        self.record.wait = Wait(clock(), None, where)
        tag = self.endpoint.next(arrived, where)
        if tag >= 0:  # else another worker failed
            self.record.wait = None
        return tag
