"""Transfers that are matched by their order, as those of NCCL are.

Each directed edge between two workers has a connection of its own, on which the k-th
send meets the k-th receive; workers that add up sums have one, on which the k-th sums
of all meet. On a device, a transfer begins when what the program has
launched before it is done, and goes on beside what is launched later; waiting for it
holds up only the device. So the host launches a whole step without waiting.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from .endpoints import Where
from .wire_format import AllReduce, Parcel

SENDS, BYTES = 4, 1 << 22  # on their way to a peer, or more while they are small


class Work(Protocol):
    """A send or a receive that has begun, such as torch.distributed.Work."""

    def wait(self) -> object:
        """Has what the present stream gets from now on run after it."""

    def is_completed(self) -> bool:
        """Whether it is done."""


class Connection(Protocol):
    """The way from one worker to another."""

    def send(self, buffer: Tensor, tag: int) -> Work:
        """Begins to send, once what the present stream has so far is done."""

    def receive(self, buffer: Tensor, tag: int) -> Work:
        """Begins to receive, likewise."""


class Meeting(Protocol):
    """The way between workers that add up sums."""

    def all_reduce(self, buffer: Tensor, tag: int) -> Work:
        """Begins to add up the buffers of all, in each of them, likewise."""


class OrderedEndpoint:
    """A worker's end of its connections, which one thread uses.

    device: where buffers of messages lie. connection: by source and destination.
    meeting: by workers.
    """

    def __init__(
        self,
        worker: int,
        device: torch.device,
        connection: Callable[[int, int], Connection],
        meeting: Callable[[tuple[int, ...]], Meeting],
    ) -> None:
        self.worker, self.device = worker, device
        self.connection, self.meeting = connection, meeting
        self.coming: dict[int, list[tuple[Work, Tensor]]] = {}
        self.leaving: dict[int, deque[tuple[Work, Tensor]]] = {}  # by peer

    def send(self, value: Any, parcel: Parcel | AllReduce) -> None:
        """Keeps what is sent until it has left, since the next tensor of the present
        stream could lie there. Before it keeps more than BYTES for a peer, the stream
        waits."""
        if isinstance(parcel, AllReduce):
            meeting, tag = self.meeting(parcel.workers), parcel.tag
            buffers = parcel.buffers(value)
            self.coming[tag] = [(meeting.all_reduce(b, tag), b) for b in buffers]
            return
        way = self.connection(self.worker, parcel.peer)
        leaving = self.leaving.setdefault(parcel.peer, deque())
        for buffer in parcel.buffers(value, self.device):
            leaving.append((way.send(buffer, parcel.tag), buffer))
        while leaving[0][0].is_completed() and len(leaving) > 1:
            leaving.popleft()
        while len(leaving) > SENDS and sum(b.nbytes for _, b in leaving) > BYTES:
            leaving.popleft()[0].wait()

    def expect(self, parcel: Parcel) -> None:
        way = self.connection(parcel.peer, self.worker)
        self.coming[parcel.tag] = [
            (way.receive(buffer, parcel.tag), buffer)
            for buffer in parcel.empty(self.device)
        ]

    def take(self, parcel: Parcel | AllReduce) -> Any:
        coming = self.coming.pop(parcel.tag)
        for work, _ in coming:
            work.wait()
        return parcel.value([buffer for _, buffer in coming])

    def finish(self) -> None:
        for sends in self.leaving.values():  # the last of a peer leaves last
            if sends:
                sends[-1][0].wait()
                sends.clear()

    def watch(self, parcel: Parcel, arrived: queue.SimpleQueue[int]) -> NoReturn:
        raise RuntimeError("messages matched by order don't go with order='dynamic'")

    def next(self, arrived: queue.SimpleQueue[int], where: Where) -> NoReturn:
        raise RuntimeError("messages matched by order don't go with order='dynamic'")

    def share(self) -> NoReturn:
        raise RuntimeError("messages matched by order don't go with lanes")
