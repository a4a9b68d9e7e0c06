"""Messages on a network, on a virtual clock.

Bytes of messages that go through the same resource at a time, such as a host's way out,
share it max-min fairly: no message's rate can grow but at the cost of one that has no
more (Bertsekas and Gallager 1992, Data Networks, 6.5.2). TCP's connections come close
to that. Rates change only where a message begins or ends, and only of messages that
share something with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

BEGINS = 0  # in the place of the version of an event that says when a message ends


class LinkName(NamedTuple):
    """A link's name, after two numbers by which links are sorted."""

    first: int
    second: int
    text: str


class Wire(NamedTuple):
    """What a message goes through.

    bandwidth: bytes a second, where it shares nothing.
    resources: what it shares with others, by name; see Flows.
    begin: seconds before its first byte leaves, in which no other message of the same
        wire does. latency: seconds from the last byte's leaving to its arrival.
    links: whose use is counted; see links.py.
    """

    bandwidth: float
    resources: tuple[Hashable, ...] = ()
    begin: float = 0.0
    latency: float = 0.0
    links: tuple[LinkName, ...] = ()


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
    """Messages that share resources, by number, from their first byte to their last.

    capacity: bytes a second of each resource.
    """

    def __init__(self, capacity: Mapping[Hashable, float]) -> None:
        self.capacity = capacity
        self.given: dict[int, tuple[Sequence[Hashable], float]] = {}  # yet to begin
        self.uses: dict[int, Sequence[Hashable]] = {}  # of those under way, resources,
        self.left: dict[int, float] = {}  # bytes,
        self.rates: dict[int, float] = {}  # and bytes a second
        self.users: dict[Hashable, dict[int, None]] = {}
        self.since = 0.0  # when these rates began
        self.version = 0  # of these rates
        self.events: list[tuple[float, int, int]] = []

    def add(
        self, number: int, when: float, resources: Sequence[Hashable], size: float
    ) -> None:
        """Says when the first of a message's bytes leaves, not before now."""
        self.given[number] = resources, size
        heappush(self.events, (when, BEGINS, number))

    def next(self) -> tuple[float, int] | None:
        """When the last byte of the next message leaves, and which; the clock goes on
        to then."""
        while self.events:
            now, version, number = heappop(self.events)
            if version not in (BEGINS, self.version):
                continue
            if now > self.since:
                for other, rate in self.rates.items():
                    self.left[other] -= rate * (now - self.since)
                self.since = now
            if version != BEGINS:
                resources = self.uses.pop(number)
                del self.left[number], self.rates[number]
                for name in resources:
                    del self.users[name][number]
                self._share(resources)
                return now, number
            resources, self.left[number] = self.given.pop(number)
            self.uses[number] = resources
            for name in resources:
                self.users.setdefault(name, {})[number] = None
            self._share(resources)
        return None

    def _share(self, resources: Sequence[Hashable]) -> None:
        """New rates for the users of these resources, and for all that share with them,
        one with the next; and when the first message has left at the rates of all."""
        names, linked = [*resources], set[int]()
        for name in names:
            for number in self.users[name]:
                if number not in linked:
                    linked.add(number)
                    names += self.uses[number]
        if linked:
            uses = {n: own for n, own in self.uses.items() if n in linked}
            self.rates.update(fair_rates(uses, self.capacity))
        self.version += 1
        if self.left:
            ends = [(max(b, 0.0) / self.rates[n], n) for n, b in self.left.items()]
            seconds, first = min(ends)
            heappush(self.events, (self.since + seconds, self.version, first))
