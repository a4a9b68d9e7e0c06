"""One worker's end of the transfers of a run, and that of threads of one process.

Endpoints of every transport have the same methods: send never waits; expect says early
what will come; take waits for it; watch puts its tag in a queue once it is there, and
next waits for that; finish waits until what was sent has left.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from .wire_format import Parcel

Where = Callable[[], tuple[int | None, str]]  # the worker and job that a run waits for


class Aborted(Exception):
    """Another worker failed; this one stops waiting for it."""


class Endpoint(Protocol):
    """One worker's end of the transfers of one run."""

    def send(self, value: Any, parcel: Parcel) -> None:
        """Sends a value, without waiting for who takes it."""

    def expect(self, parcel: Parcel) -> None:
        """Makes room for what will be taken."""

    def take(self, parcel: Parcel) -> Any:
        """The value of a message; waits until it is there."""

    def watch(self, parcel: Parcel, arrived: queue.SimpleQueue[int]) -> None:
        """Has a message's tag put into a queue when it is there."""

    def next(self, arrived: queue.SimpleQueue[int], where: Where) -> int:
        """The next tag that a queue gets; `where` says who waits."""

    def finish(self) -> None:
        """Waits until all that was sent has left."""

    def share(self) -> None:
        """Says that several threads of this worker will use it."""

    def fail(self, error: BaseException) -> None:
        """Wakes all that waits here, as the run can't go on."""


class Exchange:
    """Values on their way between the threads of one run, by reference."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.watching: dict[int, queue.SimpleQueue[int]] = {}
        self.changed = threading.Condition()
        self.failed = False
        self.queues: list[queue.SimpleQueue[int]] = []

    def endpoint(self, worker: int) -> Endpoint:
        """What a worker sends and takes through."""
        return ThreadEndpoint(self)

    def abort(self) -> None:
        """Wakes every worker that waits, to raise Aborted."""
        with self.changed:
            self.failed = True
            self.changed.notify_all()
            for waiting in self.queues:
                waiting.put(-1)


class ThreadEndpoint:
    """An endpoint between threads of one process."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def send(self, value: Any, parcel: Parcel) -> None:
        tag = parcel.tag
        with self.exchange.changed:
            self.exchange.values[tag] = value
            if tag in self.exchange.watching:
                self.exchange.watching.pop(tag).put(tag)
            self.exchange.changed.notify_all()

    def expect(self, parcel: Parcel) -> None:
        pass

    def take(self, parcel: Parcel) -> Any:
        with self.exchange.changed:
            while parcel.tag not in self.exchange.values:
                if self.exchange.failed:
                    raise Aborted
                self.exchange.changed.wait()
            return self.exchange.values.pop(parcel.tag)

    def watch(self, parcel: Parcel, arrived: queue.SimpleQueue[int]) -> None:
        tag = parcel.tag
        with self.exchange.changed:
            if arrived not in self.exchange.queues:
                self.exchange.queues.append(arrived)
            if self.exchange.failed:
                arrived.put(-1)
            elif tag in self.exchange.values:
                arrived.put(tag)
            else:
                self.exchange.watching[tag] = arrived

    def next(self, arrived: queue.SimpleQueue[int], where: Where) -> int:
        return arrived.get()

    def finish(self) -> None:
        pass

    def share(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        self.exchange.abort()
