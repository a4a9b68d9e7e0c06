"""Queues of a simulated device, which run late, in any order that CUDA allows.

What is launched waits in its stream's queue until somebody synchronizes. Then one
queue's first item runs after the other, by chance, or those of messages last. Workers
are threads with a stream of their own to compute on, and one for each connection.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

SECONDS = 10  # without an item that can run: they never can
lock = threading.RLock()
changed = threading.Condition(lock)


class Stuck(RuntimeError):
    """No queue can go on."""


class Item:
    """Something in a queue."""

    def __init__(self, name: str, run: Callable[[], object] | None = None) -> None:
        self.name, self.run, self.done = name, run, False
        self.queue: deque[Item] | None = None

    def ready(self) -> bool:
        """Whether it can run, as the first of its queue."""
        return True

    def go(self) -> None:
        """Runs it, and takes it out of its queue."""
        assert self.queue is not None and self.queue[0] is self
        if self.run is not None:
            self.run()
        self.queue.popleft()
        self.done = True


class Waits(Item):
    """Until another item is done."""

    def __init__(self, other: Item) -> None:
        super().__init__(f"wait for {other.name}")
        self.other = other

    def ready(self) -> bool:
        return self.other.done


class Transfer(Item):
    """A send, a receive or a part of a sum, done with those of all `workers`.

    parts: of the workers that have come to it, in one list for all of them.
    """

    def __init__(
        self,
        name: str,
        buffer: Tensor,
        parts: list[Transfer],
        workers: int,
        worker: int,
    ) -> None:
        super().__init__(name)
        self.buffer, self.parts = buffer, parts
        self.workers, self.worker = workers, worker

    def begin(self) -> None:
        """Just before it is the first of its queue."""

    def ready(self) -> bool:
        first = (bool(each.queue) and each.queue[0] is each for each in self.parts)
        return len(self.parts) == self.workers and all(first)

    def go(self) -> None:
        first, *others = self.parts
        self.carry_out(first.buffer, [each.buffer for each in others])
        for each in self.parts:
            super(Transfer, each).go()

    def carry_out(self, first: Tensor, others: Sequence[Tensor]) -> None:
        """Copies what is sent: the send is the first part."""
        others[0].copy_(first)


class Sum(Transfer):
    """A part of a sum, whose memory is poisoned until it is done."""

    def begin(self) -> None:
        """Keeps what is added up."""
        self.given = self.buffer.clone()
        self.buffer.fill_(math.nan)

    def carry_out(self, first: Tensor, others: Sequence[Tensor]) -> None:
        total = sum(each.given for each in self.parts)
        for each in (first, *others):
            each.copy_(total)


class Stream:
    """What runs in order. queue: that of the hardware, which streams may share.

    captured: takes what is launched instead, during a capture. pool: whose memory that
    uses then.
    """

    def __init__(
        self,
        queue: deque[Item] | None = None,
        carries: bool = False,
        worker: int | None = None,
    ) -> None:
        self.queue: deque[Item] = deque() if queue is None else queue
        self.carries, self.worker = carries, worker  # messages; its number
        self.captured: list[Item] | None = None
        self.pool: object = None

    def put(self, item: Item) -> Item:
        """Adds an item at the end."""
        with lock:
            if self.captured is not None:
                self.captured.append(item)
                return item
            _queues.setdefault(id(self.queue), (self.queue, self.carries))
            item.queue = self.queue
            self.queue.append(item)
            changed.notify_all()
        return item

    def launch(
        self, run: Callable[[], object], name: str, reads: Sequence[object] = ()
    ) -> None:
        """Adds an operator; outside of a worker it runs at once. reads: its inputs."""

        def checked() -> None:
            for each in reads:
                floats = isinstance(each, Tensor) and each.is_floating_point()
                if floats and each.isnan().any():
                    poisoned.append(name)
            run()

        item = self.put(Item(name, checked))
        if getattr(_own, "worker", None) is None and self.captured is None:
            synchronize(item)

    def mark(self) -> Item:
        """An event that has all so far before it."""
        return self.put(Item("event"))

    def wait_stream(self, other: Stream) -> None:
        """What comes from now on runs after what another stream has so far."""
        self.put(Waits(other.mark()))


_queues: dict[int, tuple[deque[Item], bool]] = {}
_own = threading.local()
poisoned: list[str] = []  # operators that have read NaN
policy: dict[str, Any] = {"late": False, "draw": random.Random(0), "last": set()}


class Worker:
    """A worker's queues: K of the hardware, or one for each stream."""

    def __init__(self, number: int, queues: int | None) -> None:
        self.number, self.count = number, queues
        self.hardware = [deque[Item]() for _ in range(queues or 0)]
        self.streams: dict[object, Stream] = {}

    def stream(self, name: object) -> Stream:
        """The stream of a name, made at first use."""
        if name not in self.streams:
            place = len(self.streams) % (self.count or 1)
            queue = self.hardware[place] if self.count else None
            carries = not isinstance(name, str)
            self.streams[name] = Stream(queue, carries, self.number)
        return self.streams[name]


def enter(worker: Worker | None) -> None:
    """Makes this thread a worker's, or nobody's."""
    _own.worker, _own.beside = worker, None


def current_stream() -> Stream:
    """The stream that this thread launches to."""
    worker = getattr(_own, "worker", None)
    if worker is not None:
        return _own.beside or worker.stream("compute")
    if getattr(_own, "stream", None) is None:
        _own.stream = Stream()
    return _own.stream


def new_stream(device: object = None) -> Stream:
    """A stream beside a worker's own, the same for all that it asks for."""
    worker = getattr(_own, "worker", None)
    return Stream() if worker is None else worker.stream("beside")


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """This thread launches there, until it becomes a worker's."""
    name = "stream" if getattr(_own, "worker", None) is None else "beside"
    before = getattr(_own, name, None)
    setattr(_own, name, stream)
    try:
        yield
    finally:
        setattr(_own, name, before)


def synchronize(until: Item | None = None) -> None:
    """Runs what waits until an item is done, or all is."""
    if current_stream().captured is not None:
        raise RuntimeError("operation not permitted when stream is capturing")
    began = time.monotonic()
    with lock:
        while until is None or not until.done:
            full = [(q, carries) for q, carries in _queues.values() if q]
            if not full:
                assert until is None or until.done
                return
            able = [(q, carries) for q, carries in full if q[0].ready()]
            if policy["late"]:
                able = sorted(able, key=_lateness)
                able = [each for each in able if _lateness(each) == _lateness(able[0])]
            if able:
                policy["draw"].choice(able)[0][0].go()
                began = time.monotonic()
                continue
            if time.monotonic() - began > SECONDS:
                heads = "; ".join(q[0].name for q, _ in full)
                raise Stuck(f"no queue can go on: {heads}")
            changed.wait(0.05)


def _lateness(one: tuple[deque[Item], bool]) -> int:
    """How late the first of a queue runs, where messages are last."""
    queue, carries = one
    return carries + (id(queue[0]) in policy["last"])


def forget() -> None:
    """Empties all queues."""
    with lock:
        for queue, _ in _queues.values():
            queue.clear()
        _queues.clear()
