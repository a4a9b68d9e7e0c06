"""The best cut of a graph into stages, by dynamic programming over ideals.

An ideal is a set of units that holds all that its members read. A stage is the
difference of two ideals, so that the best cut is a best path from the empty ideal to
the whole (Tarnawski et al. 2020, arXiv 2006.16423). A chain of N units has N + 1
ideals, k branches of N units (N + 1) ** k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import networkx as nx

from .cut_cost import BRANCH, EXPOSED, MIXED, Problem, mixed

# Sets of units that a search may visit; a quick one a sixth of it.
VISITS = 48_000
# Ways to cut an ideal that a quick search keeps.
FEW = 6


class Label(NamedTuple):
    """A way to cut an ideal into stages."""

    slowest: float  # seconds of the slowest stage
    longest: float  # seconds of the longest path so far
    ends: tuple[float, ...]  # of the paths to each maker that others still read
    least: float  # seconds that a whole cut from here takes at least
    before: Label | None
    members: tuple[int, ...]  # of the last stage

    def beats(self, other: Label) -> bool:
        return (
            self.slowest <= other.slowest
            and self.longest <= other.longest
            and all(a <= b for a, b in zip(self.ends, other.ends, strict=True))
        )


class TooMany(Exception):
    """The search would take too long."""


# A larger ideal and the units that it adds.
Grow = Iterator[tuple[int, tuple[int, ...]]]


class Search:
    """The best path from the empty ideal to the whole, below a known bound.

    Ideals are ints with a bit for each unit. The search is exact unless it is `quick`:
    then of the ways to cut an ideal only FEW that promise most are kept.
    """

    def __init__(
        self, problem: Problem, stages: int, bound: float, quick: bool = False
    ) -> None:
        self.problem, self.stages, self.bound = problem, stages, bound
        self.quick = quick
        self.count = len(problem.units)
        self.heavy = BRANCH * problem.seconds / stages
        self.preds = [_mask(problem.graph.predecessors(u)) for u in range(self.count)]
        self.tail = _tails(problem)
        self.makes: list[list[tuple[int, float]]] = [[] for _ in range(self.count)]
        self.reads: list[list[tuple[int, float]]] = [[] for _ in range(self.count)]
        for value in problem.values:
            self.makes[value.maker].append((_mask(value.readers), value.seconds))
            for reader in value.readers:
                self.reads[reader].append((value.maker, value.seconds))
        self.fronts: dict[int, list[tuple[int, float]]] = {}
        self.visited = 0
        path = max(self.tail, default=0.0)
        spare = bound - path
        self.slowest = spare / problem.rounds if problem.rounds else float("inf")

    def run(self, order: Sequence[int] | None = None) -> Label | None:
        """The best label of the whole; of ideals that are prefixes of `order`, if it
        is given. None if no cut is below the bound."""
        whole = (1 << self.count) - 1
        start = Label(self.problem.floor, 0.0, (), 0.0, None, ())
        table: list[dict[int, dict[int, list[Label]]]] = [
            {} for _ in range(self.count + 1)
        ]
        table[0][0] = {0: [start]}
        place = {0: 0}
        if order is not None:
            prefix = 0
            for i, unit in enumerate(order):
                prefix |= 1 << unit
                place[prefix] = i + 1
        for size in range(self.count):
            for ideal, labels in table[size].items():
                if order is None:
                    steps = self._any(ideal)
                else:
                    steps = self._prefixes(ideal, order, place[ideal])
                for larger, members in steps:
                    found = table[size + len(members)].setdefault(larger, {})
                    self._extend(ideal, labels, larger, members, found)
            table[size] = {}
        ends = table[self.count].get(whole, {}).get(self.stages, [])
        rounds = self.problem.rounds
        return min(ends, key=lambda e: rounds * e.slowest + e.longest, default=None)

    def _prefixes(self, ideal: int, order: Sequence[int], start: int) -> Grow:
        seconds = 0.0
        for end in range(start, self.count):
            seconds += self.problem.units[order[end]].seconds
            members = tuple(order[start : end + 1])
            if seconds > self.slowest and end > start:
                return
            if self._splits(order[end], members):
                return
            ideal |= 1 << order[end]
            yield ideal, members

    def _any(self, ideal: int) -> Grow:
        units = self.problem.units
        seen = {ideal}
        stack: list[tuple[int, tuple[int, ...], float]] = [(ideal, (), 0.0)]
        while stack:
            now, members, seconds = stack.pop()
            for unit in range(self.count):
                larger = now | 1 << unit
                if now >> unit & 1 or self.preds[unit] & ~now or larger in seen:
                    continue
                more = seconds + units[unit].seconds
                if (more > self.slowest and members) or self._splits(unit, members):
                    continue
                self.visited += 1
                if self.visited > (VISITS // 6 if self.quick else VISITS):
                    raise TooMany
                seen.add(larger)
                stack.append((larger, (*members, unit), more))
                yield larger, (*members, unit)

    def _splits(self, unit: int, members: Sequence[int]) -> bool:
        """Whether a unit may not share a stage with one of these."""
        apart = self.problem.apart
        return bool(apart) and any(
            (unit, m) in apart or (m, unit) in apart for m in members
        )

    def _front(self, ideal: int) -> list[tuple[int, float]]:
        """Units that others still read, and the seconds from them to the end."""
        if ideal not in self.fronts:
            self.fronts[ideal] = [
                (unit, max(self.tail[r] for r in _units(readers)))
                for unit in range(self.count)
                if ideal >> unit & 1 and (readers := self._readers(unit) & ~ideal)
            ]
        return self.fronts[ideal]

    def _readers(self, unit: int) -> int:
        found = 0
        for readers, _ in self.makes[unit]:
            found |= readers
        return found

    def _extend(
        self,
        ideal: int,
        labels: dict[int, list[Label]],
        larger: int,
        members: tuple[int, ...],
        found: dict[int, list[Label]],
    ) -> None:
        """Adds to the larger ideal's labels those of this one with one more stage."""
        problem = self.problem
        busy = sum(problem.units[u].seconds for u in members)
        arrive: dict[int, float] = {}
        for unit in members:
            for maker, seconds in self.reads[unit]:
                if ideal >> maker & 1:
                    arrive[maker] = max(arrive.get(maker, 0.0), seconds)
        exposed = 0.0
        for maker in arrive:
            for readers, seconds in self.makes[maker]:
                if readers & larger & ~ideal:
                    exposed += seconds
        for unit in members:
            for readers, seconds in self.makes[unit]:
                if readers & ~larger:
                    exposed += seconds
        if busy + exposed * EXPOSED > self.slowest:
            return
        branches = mixed(problem, members, self.heavy)
        time = busy * (1 + MIXED * branches) + exposed * EXPOSED
        if time > self.slowest:
            return
        front = self._front(ideal)
        inside = set(members)
        next_front = self._front(larger)
        where = {maker: i for i, (maker, _) in enumerate(front)}
        rest = self.count - larger.bit_count()
        rest_seconds = self._rest(larger)
        for k, known in labels.items():
            left = self.stages - k - 1
            if left > rest or (rest and not left):
                continue
            if problem.limit is not None and problem.memory(members, k) > problem.limit:
                continue
            least = rest_seconds / left if left else 0.0
            for label in known:
                begin = max(
                    (label.ends[where[m]] + c for m, c in arrive.items()), default=0.0
                )
                end = begin + busy
                slowest = max(label.slowest, time)
                longest = max(label.longest, end)
                ends = tuple(
                    end if m in inside else label.ends[where[m]] for m, _ in next_front
                )
                path = max(
                    [
                        longest,
                        *(e + t for e, (_, t) in zip(ends, next_front, strict=True)),
                    ]
                )
                promise = problem.rounds * max(slowest, least) + path
                if promise >= self.bound:
                    continue
                new = Label(slowest, longest, ends, promise, label, members)
                others = found.setdefault(k + 1, [])
                if not any(other.beats(new) for other in others):
                    others[:] = [other for other in others if not new.beats(other)]
                    others.append(new)
                    if not rest:
                        self._improve(new)
                    if self.quick and len(others) > FEW:
                        others.remove(max(others, key=lambda other: other.least))

    def _improve(self, label: Label) -> None:
        self.bound = min(
            self.bound, self.problem.rounds * label.slowest + label.longest
        )

    def _rest(self, ideal: int) -> float:
        units = self.problem.units
        return sum(u.seconds for i, u in enumerate(units) if not ideal >> i & 1)


def _mask(units: Iterator[int] | Sequence[int]) -> int:
    found = 0
    for unit in units:
        found |= 1 << unit
    return found


def _units(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _tails(problem: Problem) -> list[float]:
    """For each unit the seconds of the longest path from its start to the end."""
    found = [0.0] * len(problem.units)
    for unit in reversed(list(nx.topological_sort(problem.graph))):
        after = max((found[r] for r in problem.graph.successors(unit)), default=0.0)
        found[unit] = problem.units[unit].seconds + after
    return found
