"""Transfers between threads of one process by the rules of NCCL.

A message has no tag: the k-th send from one worker to another meets the k-th receive
that the other has posted, and neither is done before both have come. So do the k-th
sums of several workers. A worker's sends, receives and sums wait in a few queues, as
kernels do in the hardware queues of a GPU: only the first of a queue can be done. What
would hang on GPUs, or be taken for another message, is an error here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..ir.step import Way
from .endpoints import Aborted, Exchange
from .ordered import OrderedEndpoint

HOST = torch.device("cpu")
QUEUES = 8  # of a worker, as CUDA_DEVICE_MAX_CONNECTIONS is by default
UNDER_WAY = 1024  # of a worker's transfers; the next send or receive waits


class TransferError(RuntimeError):
    """Messages that would hang or be mispaired on GPUs."""


@dataclass(eq=False)
class _Transfer:
    """A worker's part in what goes over a connection, and its memory: a send or a
    receive over an edge, or a sum of workers."""

    worker: int
    way: Way
    tag: int
    buffer: Tensor
    done: bool = False

    def __str__(self) -> str:
        if isinstance(self.way, frozenset):
            others = ", ".join(map(str, sorted(self.way - {self.worker})))
            return f"sum {self.tag} to be added up by workers {others}"
        source, to = self.way
        if self.worker == source:
            return f"message {self.tag} to be received by worker {to}"
        return f"message {self.tag} to be sent by worker {source}"


class StrictExchange(Exchange):
    """What workers of one run send each other.

    queues: how many each worker has. open: the connections, which ranks make before the
        first step; None for any.
    """

    def __init__(
        self, workers: int, queues: int | None = None, open: Set[Way] | None = None
    ) -> None:
        super().__init__()
        self.workers, self.count = workers, queues or QUEUES
        self.open, self.running = open, {*range(workers)}
        self.waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self.queued: dict[tuple[int, int], deque[_Transfer]] = {}
        # of a connection's queue, by worker and connection
        self.number: dict[tuple[int, Way], int] = {}
        self.under_way = [0] * workers
        self.error: TransferError | None = None

    def endpoint(self, worker: int) -> StrictEndpoint:
        """What a worker sends and takes through."""
        return StrictEndpoint(self, worker)

    def post(self, transfer: _Transfer) -> None:
        """Begins a worker's part."""
        worker = transfer.worker

        def room() -> bool:
            return self.under_way[worker] < UNDER_WAY

        with self.changed:
            if self.open is not None and transfer.way not in self.open:
                self._fail(f"worker {worker} has no connection for {transfer}")
            if self.error is not None:
                raise self.error
            self.wait(worker, room, "room for one more send or receive")
            self.under_way[worker] += 1
            self._queue(worker, transfer.way).append(transfer)
            self._go_on(transfer)

    def _queue(self, worker: int, way: Way) -> deque[_Transfer]:
        ways = sum(own == worker for own, _ in self.number)
        number = self.number.setdefault((worker, way), ways % self.count)
        return self.queued.setdefault((worker, number), deque())

    def _go_on(self, transfer: _Transfer) -> None:
        """Does this transfer and those behind it that can be done."""
        firsts = [transfer]
        while firsts:
            own = firsts.pop()
            lines = [self._queue(worker, own.way) for worker in own.way]
            heads = [line[0] for line in lines if line]
            met = len(heads) == len(lines) and all(h.way == own.way for h in heads)
            if own.done or not met:
                continue
            if len({each.tag for each in heads}) > 1:
                self._fail(_mispaired(heads))
                return
            for each, line in zip(heads, lines, strict=True):
                line.popleft()
                each.done = True
                self.under_way[each.worker] -= 1
                firsts += [*line][:1]
            _carry_out(heads)
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
        super().__init__(
            worker,
            HOST,
            lambda *edge: End(exchange, worker, edge),
            lambda workers: End(exchange, worker, frozenset(workers)),
        )
        self.exchange = exchange

    def finish(self) -> None:
        super().finish()
        self.exchange.ended(self.worker)

    def fail(self, error: BaseException) -> None:
        self.exchange.abort()


class End(NamedTuple):
    """A worker's end of a connection."""

    exchange: StrictExchange
    worker: int
    way: Way

    def send(self, buffer: Tensor, tag: int) -> Posted:
        """Begins to send."""
        return self._post(buffer, tag)

    def receive(self, buffer: Tensor, tag: int) -> Posted:
        """Begins to receive."""
        return self._post(buffer, tag)

    def all_reduce(self, buffer: Tensor, tag: int) -> Posted:
        """Begins to add up the buffers of all."""
        return self._post(buffer, tag)

    def _post(self, buffer: Tensor, tag: int) -> Posted:
        transfer = _Transfer(self.worker, self.way, tag, buffer)
        self.exchange.post(transfer)
        return Posted(self.exchange, transfer)


class Posted(NamedTuple):
    """A worker's part that has begun."""

    exchange: StrictExchange
    transfer: _Transfer

    def wait(self) -> None:
        """Waits until it is done."""
        own = self.transfer
        with self.exchange.changed:
            self.exchange.wait(own.worker, self.is_completed, str(own))

    def is_completed(self) -> bool:
        """Whether all its workers have come to it."""
        return self.transfer.done


def _carry_out(parts: Sequence[_Transfer]) -> None:
    """What is sent is copied, and sums are added up; parts: in the order of `way`."""
    first, *others = (each.buffer for each in parts)
    if isinstance(parts[0].way, frozenset):
        for each in others:
            first.add_(each)
    for each in others:
        each.copy_(first)


def _mispaired(parts: Sequence[_Transfer]) -> str:
    if isinstance(parts[0].way, frozenset):
        numbers = (f"worker {each.worker} sum {each.tag}" for each in parts)
        return f"workers add up different sums: {', '.join(numbers)}"
    (source, to), (send, receive) = parts[0].way, parts
    return (
        f"worker {source} sends message {send.tag} to worker {to}, which has posted "
        f"the receive of message {receive.tag} for it; sends and receives of two "
        "workers must be in the same order"
    )
