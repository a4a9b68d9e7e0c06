"""How fast messages between ranks are, measured with messages as a step sends them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ir.graphs import Spec
from .processes import ProcessEndpoint, Processes
from .wire_format import Parcel

SMALL = 64  # bytes of a message whose bytes take no time
TRIPS = 24  # of small messages, and of large ones where these are fast
AT_ONCE = 4  # large messages, one after the other
FIRST, LARGEST = 1 << 16, 1 << 22  # bytes of a large message
LONG = 0.2  # seconds that messages take from which their bytes tell the bandwidth
MOST_ROUNDS = 7  # of pairs of hosts

Pair = tuple[int, int]


class Speed(NamedTuple):
    """What messages between two ranks take; see the fields of fxsched.Rate."""

    bandwidth: float
    latency: float
    message: float
    duplex: float


def measure(processes: Processes) -> dict[Pair, Speed]:
    """The speeds between the first two ranks of each host, then between the first ranks
    of hosts, as every rank gets them; of many hosts not each pair is measured.

    All ranks call it at the same time; pairs without a common host measure together.
    """
    processes.control.calls += 1
    processes.run(0)
    endpoint = processes.endpoint()
    found: dict[Pair, Speed] = {}
    numbers = dict.fromkeys(range(processes.workers), 0)  # of messages with each rank
    for pairs in _rounds(processes.hosts):
        processes.all(None, "the next pairs of hosts")
        for pair in pairs:
            if processes.rank in pair:
                leads = processes.rank == pair[0]
                line = _Line(endpoint, pair[leads], numbers)
                speed = line.speed(leads)
                found |= {pair: speed} if leads else {}
    endpoint.finish()
    every = processes.all(found, "the speeds of all pairs")
    return {pair: speed for each in every for pair, speed in each.items()}


def _rounds(hosts: Sequence[Sequence[int]]) -> Iterator[list[Pair]]:
    """Pairs of ranks that measure at the same time: each round has a host once."""
    yield [(host[0], host[1]) for host in hosts if len(host) > 1]
    first: list[int | None] = [host[0] for host in hosts]
    if len(first) % 2:
        first.append(None)  # whose partner has nothing to do
    half = len(first) // 2
    for _ in range(min(len(first) - 1, MOST_ROUNDS)):  # a tournament's rounds
        pairs = zip(first[:half], reversed(first[half:]), strict=True)
        yield [
            (min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None
        ]
        first.insert(1, first.pop())


class _Line:
    """Messages with another rank, numbered alike on both."""

    def __init__(
        self, endpoint: ProcessEndpoint, peer: int, numbers: dict[int, int]
    ) -> None:
        self.endpoint, self.peer, self.numbers = endpoint, peer, numbers

    def _parcels(self, count: int, value: Tensor) -> list[Parcel]:
        first = self.numbers[self.peer]
        self.numbers[self.peer] += count
        specs = (Spec.of(value),)
        return [
            Parcel(self.peer, tag, specs, bundle=False, weights=False)
            for tag in range(first, first + count)
        ]

    def exchange(self, value: Tensor, sends: int, takes: int) -> list[Tensor]:
        """Sends a value so many times, and takes what the other rank sends like it."""
        parcels = self._parcels(max(sends, takes), value)
        for parcel in parcels[:takes]:
            self.endpoint.expect(parcel)
        for parcel in parcels[:sends]:
            self.endpoint.send(value, parcel)
        return [self.endpoint.take(parcel) for parcel in parcels[:takes]]

    def seconds(self, value: Tensor, leads: bool, count: int, both: bool) -> float:
        """From the first of so many messages to an answer; both: as many come, too."""
        small, began = torch.zeros(SMALL, dtype=torch.uint8), time.perf_counter()
        self.exchange(value, count * (leads or both), count * (not leads or both))
        self.exchange(small, not leads, leads)
        return time.perf_counter() - began

    def of_leader(self, seconds: float, leads: bool) -> float:
        """The leader's number, on both."""
        told = torch.tensor([seconds], dtype=torch.float64)
        return float((self.exchange(told, leads, not leads) or [told])[0])

    def speed(self, leads: bool) -> Speed:
        """Measures, as the other rank does; the result is the leader's."""
        small = torch.zeros(SMALL, dtype=torch.uint8)
        trips = [self.seconds(small, leads, 1, False) for _ in range(TRIPS)]
        trip = statistics.quantiles(trips, n=4)[0] / 2  # without waits for a core
        stream = self.seconds(small, leads, TRIPS, False) - 2 * trip
        size, before = FIRST, (0, 2 * trip)
        while True:
            large = torch.zeros(size, dtype=torch.uint8)
            self.seconds(large, leads, 1, False)  # memory that is new is slow
            spent = self.seconds(large, leads, AT_ONCE, False)
            if self.of_leader(spent, leads) > LONG or size == LARGEST:
                break
            before, size = (AT_ONCE * size, spent), 2 * size
        if size == LARGEST:  # fast: the median, for the clock is not that exact
            every = [self.seconds(large, leads, AT_ONCE, False) for _ in range(TRIPS)]
            spent, before = statistics.median(every), (0, 2 * trip)
        both = self.seconds(large, leads, AT_ONCE, True)
        moved, took = AT_ONCE * size - before[0], spent - before[1]
        message = max(0.0, stream / (TRIPS - 1))
        duplex = min(2.0, max(1.0, 2 * spent / both))
        return Speed(moved / took, max(0.0, trip - message), message, duplex)
