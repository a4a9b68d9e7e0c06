"""Messages on a network, on a virtual clock.

Bytes of messages that go through the same resource at a time, such as a host's way out,
share it max-min fairly: no message's rate can grow but at the cost of one that has no
more (Bertsekas and Gallager 1992, Data Networks, 6.5.2). TCP's connections come close
to that. Rates change only where a message begins or ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

READY, BEGINS, LEFT, ARRIVES = range(4)  # what happens to a message
ALONE = -1  # the version of an event that no other message changes


class Wire(NamedTuple):
    """What a message goes through.

    bandwidth: bytes a second, where it shares nothing.
    resources: what it shares with others, by name; see Flows.
    begin: seconds before its first byte leaves, in which no other message of the same
        line does. latency: seconds from the last byte's leaving to its arrival.
    """

    bandwidth: float
    resources: tuple[Hashable, ...] = ()
    begin: float = 0.0
    latency: float = 0.0


def fair_rates(
    uses: Mapping[int, Sequence[Hashable]], capacity: Mapping[Hashable, float]
) -> dict[int, float]:
    """Bytes a second of each message, by what it goes through."""
    left: dict[Hashable, float] = {}
    users: dict[Hashable, dict[int, None]] = {}
    for number, resources in uses.items():
        for name in resources:
            left[name] = capacity[name]
            users.setdefault(name, {})[number] = None
    rates: dict[int, float] = {}
    while users:
        tight = min(users, key=lambda name: left[name] / len(users[name]))
        share = left[tight] / len(users[tight])
        for number in [*users[tight]]:
            rates[number] = share
            for name in uses[number]:
                left[name] -= share
                del users[name][number]
                if not users[name]:
                    del users[name]
    return rates


class Flows:
    """Messages, by number, from when they may leave to when they arrive.

    lines: by line, its messages in the order in which they leave, one after the other.
    capacity: bytes a second of each resource.
    """

    def __init__(
        self,
        lines: Mapping[Hashable, Sequence[int]],
        capacity: Mapping[Hashable, float],
    ) -> None:
        self.waiting = {line: deque(numbers) for line, numbers in lines.items()}
        self.line = {n: line for line, numbers in lines.items() for n in numbers}
        self.capacity = capacity
        self.given: dict[int, tuple[Wire, float]] = {}  # of those not there yet
        self.ready: set[int] = set()
        self.busy: set[Hashable] = set()  # lines
        self.left: dict[int, float] = {}  # bytes of those that share something
        self.rates: dict[int, float] = {}
        self.since = 0.0  # when these rates began
        self.version = 0  # of these rates
        self.events: list[tuple[float, int, int, int]] = []

    def add(self, number: int, when: float, wire: Wire, size: float) -> None:
        """Says when a message of so many bytes may leave, not before now."""
        self.given[number] = wire, size
        heappush(self.events, (when, READY, number, ALONE))

    def next(self) -> tuple[float, int] | None:
        """When the next message arrives, and which; the clock goes on to then."""
        while self.events:
            now, what, number, version = heappop(self.events)
            if what == ARRIVES:
                del self.given[number]
                return now, number
            if what == READY:
                self.ready.add(number)
                self._next_of(self.line[number], now)
            elif what == BEGINS:
                self._begin(number, now)
            elif version in (ALONE, self.version):
                self._end(number, now)
        return None

    def _next_of(self, line: Hashable, now: float) -> None:
        waiting = self.waiting[line]
        if line not in self.busy and waiting and waiting[0] in self.ready:
            number = waiting.popleft()
            self.busy.add(line)
            begins = now + self.given[number][0].begin
            heappush(self.events, (begins, BEGINS, number, ALONE))

    def _begin(self, number: int, now: float) -> None:
        wire, size = self.given[number]
        if wire.resources:
            self._pass(now)
            self.left[number] = size
            self._share(now)
        else:
            left = now + size / wire.bandwidth
            heappush(self.events, (left, LEFT, number, ALONE))

    def _end(self, number: int, now: float) -> None:
        wire, line = self.given[number][0], self.line[number]
        heappush(self.events, (now + wire.latency, ARRIVES, number, ALONE))
        self.busy.remove(line)
        if wire.resources:
            self._pass(now)
            del self.left[number]
            self._share(now)
        self._next_of(line, now)

    def _pass(self, now: float) -> None:
        """Takes what has left since the rates changed."""
        for number, rate in self.rates.items():
            self.left[number] -= rate * (now - self.since)
        self.since = now

    def _share(self, now: float) -> None:
        """New rates, and when the first message has left at them."""
        uses = {number: self.given[number][0].resources for number in self.left}
        self.rates = fair_rates(uses, self.capacity)
        self.version += 1
        if self.left:
            ends = {n: max(left, 0.0) / self.rates[n] for n, left in self.left.items()}
            first = min(ends, key=lambda number: (ends[number], number))
            heappush(self.events, (now + ends[first], LEFT, first, self.version))
