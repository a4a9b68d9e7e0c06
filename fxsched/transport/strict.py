"""Transfers between threads of one process by the rules of NCCL.

A message has no tag: the k-th send from one worker to another meets the k-th receive
that the other has posted, and neither is done before both have come. A worker's sends
and receives wait in a few queues, as kernels do in the hardware queues of a GPU: only
the first of a queue can be done. What would hang on GPUs, or be taken for another
message, is an error here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .endpoints import Aborted, Exchange
from .ordered import OrderedEndpoint

HOST = torch.device("cpu")
QUEUES = 8  # of a worker, as CUDA_DEVICE_MAX_CONNECTIONS is by default
UNDER_WAY = 1024  # of a worker's transfers; the next send or receive waits


class TransferError(RuntimeError):
    """Messages that would hang or be mispaired on GPUs."""


@dataclass(eq=False)
class _Transfer:
    """A send or a receive: its worker, the edge's ends, and its memory."""

    worker: int
    edge: tuple[int, int]
    tag: int
    buffer: Tensor
    done: bool = False

    @property
    def sends(self) -> bool:
        return self.worker == self.edge[0]

    @property
    def peer(self) -> int:
        return self.edge[self.sends]


class StrictExchange(Exchange):
    """What workers of one run send each other. queues: how many each worker has."""

    def __init__(self, workers: int, queues: int | None = None) -> None:
        super().__init__()
        self.workers, self.count = workers, queues or QUEUES
        self.running = {*range(workers)}
        self.waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self.queued: dict[tuple[int, int], deque[_Transfer]] = {}
        self.number: dict[tuple[int, tuple[int, int]], int] = {}  # of an edge's queue
        self.under_way = [0] * workers
        self.error: TransferError | None = None

    def endpoint(self, worker: int) -> StrictEndpoint:
        """What a worker sends and takes through."""
        return StrictEndpoint(self, worker)

    def post(self, transfer: _Transfer) -> None:
        """Begins a send or a receive."""
        worker = transfer.worker

        def room() -> bool:
            return self.under_way[worker] < UNDER_WAY

        with self.changed:
            self.wait(worker, room, "room for one more send or receive")
            self.under_way[worker] += 1
            self._queue(worker, transfer.edge).append(transfer)
            self._go_on(transfer)

    def _queue(self, worker: int, edge: tuple[int, int]) -> deque[_Transfer]:
        edges = sum(own == worker for own, _ in self.number)
        number = self.number.setdefault((worker, edge), edges % self.count)
        return self.queued.setdefault((worker, number), deque())

    def _go_on(self, transfer: _Transfer) -> None:
        """Does this transfer and those behind it that can be done."""
        firsts = [transfer]
        while firsts:
            own = firsts.pop()
            mine = self._queue(own.worker, own.edge)
            its = self._queue(own.peer, own.edge)
            if not mine or mine[0] is not own or not its or its[0].edge != own.edge:
                continue
            other = its[0]
            if other.tag != own.tag:
                self._fail(_mispaired(own, other))
                return
            for each, line in ((own, mine), (other, its)):
                line.popleft()
                each.done = True
                self.under_way[each.worker] -= 1
                firsts += [*line][:1]
            send, receive = (own, other) if own.sends else (other, own)
            receive.buffer.copy_(send.buffer)
            self.changed.notify_all()

    def wait(self, worker: int, until: Callable[[], bool], what: str) -> None:
        """Waits, with the lock. Raises TransferError if nobody can go on."""
        self.waiting[worker] = until, what
        try:
            while not until():
                self.look()
                if self.error is not None:
                    raise self.error
                if self.failed:
                    raise Aborted
                self.changed.wait()
        finally:
            del self.waiting[worker]

    def look(self) -> None:
        """Fails if all workers that run wait in vain."""
        stuck = self.running and self.running <= self.waiting.keys()
        if stuck and not any(until() for until, _ in self.waiting.values()):
            waits = (f"worker {w} waits for {self.waiting[w][1]}" for w in self.running)
            self._fail(f"no worker can go on: {'; '.join(waits)}")

    def _fail(self, text: str) -> None:
        self.error = self.error or TransferError(f"transport='strict': {text}")
        self.changed.notify_all()

    def ended(self, worker: int) -> None:
        """Says that a worker has run up to its pause or end."""
        with self.changed:
            self.running.discard(worker)
            if self.running:
                self.look()
            else:
                self.running = {*range(self.workers)}


class StrictEndpoint(OrderedEndpoint):
    """An endpoint of a worker, which one thread uses in the program's order."""

    def __init__(self, exchange: StrictExchange, worker: int) -> None:
        super().__init__(worker, HOST, lambda *edge: Way(exchange, worker, edge))
        self.exchange = exchange

    def finish(self) -> None:
        super().finish()
        self.exchange.ended(self.worker)

    def fail(self, error: BaseException) -> None:
        self.exchange.abort()


class Way(NamedTuple):
    """A worker's end of a connection."""

    exchange: StrictExchange
    worker: int
    edge: tuple[int, int]

    def send(self, buffer: Tensor, tag: int) -> Posted:
        """Begins to send."""
        return self._post(buffer, tag)

    def receive(self, buffer: Tensor, tag: int) -> Posted:
        """Begins to receive."""
        return self._post(buffer, tag)

    def _post(self, buffer: Tensor, tag: int) -> Posted:
        transfer = _Transfer(self.worker, self.edge, tag, buffer)
        self.exchange.post(transfer)
        return Posted(self.exchange, transfer)


class Posted(NamedTuple):
    """A send or a receive that has begun."""

    exchange: StrictExchange
    transfer: _Transfer

    def wait(self) -> None:
        """Waits until it is done."""
        own = self.transfer
        what = "received" if own.sends else "sent"
        what = f"message {own.tag} to be {what} by worker {own.peer}"
        with self.exchange.changed:
            self.exchange.wait(own.worker, self.is_completed, what)

    def is_completed(self) -> bool:
        """Whether both workers have come to it."""
        return self.transfer.done


def _mispaired(one: _Transfer, other: _Transfer) -> str:
    send, receive = (one, other) if one.sends else (other, one)
    source, to = send.edge
    return (
        f"worker {source} sends message {send.tag} to worker {to}, which has posted "
        f"the receive of message {receive.tag} for it; sends and receives of two "
        "workers must be in the same order"
    )
