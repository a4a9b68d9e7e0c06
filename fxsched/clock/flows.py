"""Messages on a network, on a virtual clock.

Bytes of messages that go through the same resource at a time, such as a host's way out,
share it max-min fairly: no message's rate can grow but at the cost of one that has no
more (Bertsekas and Gallager 1992, Data Networks, 6.5.2). TCP's connections come close
to that. Rates change only where a message begins or ends, and only of messages that
share something with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

BEGINS, ENDS = False, True


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


@dataclass
class _Flow:
    """A message under way.

    left: bytes that were left at `since`; since then it has had this rate. changes: of
        its rate; an end with another number is out of date.
    """

    resources: Sequence[Hashable]
    left: float
    since: float
    rate: float = 0.0
    changes: int = 0


class Flows:
    """Messages that share resources, by number, from their first byte to their last.

    capacity: bytes a second of each resource.
    """

    def __init__(self, capacity: Mapping[Hashable, float]) -> None:
        self.capacity = capacity
        self.given: dict[int, _Flow] = {}  # yet to begin
        self.flows: dict[int, _Flow] = {}
        self.users: dict[Hashable, dict[int, None]] = {}
        self.changed: dict[
            Hashable, None
        ] = {}  # resources whose users changed since rates were shared
        self.now = 0.0
        self.events: list[tuple[float, bool, int, int]] = []

    def add(
        self, number: int, when: float, resources: Sequence[Hashable], size: float
    ) -> None:
        """Says when the first of a message's bytes leaves, not before now."""
        self.given[number] = _Flow(resources, size, when)
        heappush(self.events, (when, BEGINS, number, 0))

    def next(self) -> tuple[float, int] | None:
        """When the last byte of the next message leaves, and which; the clock goes on
        to then."""
        while self.events or self.changed:
            if self.changed and not (self.events and self.events[0][0] <= self.now):
                self._share()  # once for all that begins and ends at this time
                continue
            when, kind, number, changes = heappop(self.events)
            if kind is BEGINS:
                self.now = when
                flow = self.flows[number] = self.given.pop(number)
                for name in flow.resources:
                    self.users.setdefault(name, {})[number] = None
                    self.changed[name] = None
            elif number in self.flows and self.flows[number].changes == changes:
                self.now = when
                for name in self.flows.pop(number).resources:
                    del self.users[name][number]
                    self.changed[name] = None
                return when, number
        return None

    def _share(self) -> None:
        """New rates for the users of the changed resources, and for all that share with
        them, one with the next."""
        names, linked = [*self.changed], dict[int, Sequence[Hashable]]()
        self.changed.clear()
        for name in names:
            for number in self.users[name]:
                if number not in linked:
                    linked[number] = self.flows[number].resources
                    names += linked[number]
        for number, rate in fair_rates(linked, self.capacity).items():
            flow = self.flows[number]
            if rate != flow.rate:
                flow.left -= flow.rate * (self.now - flow.since)
                flow.rate, flow.since = rate, self.now
                flow.changes += 1
                end = self.now + max(flow.left, 0.0) / rate
                heappush(self.events, (end, ENDS, number, flow.changes))
