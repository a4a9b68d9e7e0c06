"""The best cut of a graph into stages, by dynamic programming over ideals.

An ideal is a set of units that holds all that its members read. A stage is the
difference of two ideals, so that the best cut is a best path from the empty ideal to
the whole (Tarnawski et al. 2020, arXiv 2006.16423). A chain of N units has N + 1
ideals, k branches of N units (N + 1) ** k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import le
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
        """Whether it is as good in all that later stages see."""
        return (
            self.slowest <= other.slowest
            and self.longest <= other.longest
            and all(map(le, self.ends, other.ends))
        )


class Extension(NamedTuple):
    """One more stage, from an ideal to a larger one, as every way to cut the ideal sees
    it. Front: the units of an ideal that others still read, in order.

    arrivals: for each unit of the ideal's front that the stage reads, its place there
        and the seconds from its end to the stage's start.
    front: for each unit of the larger ideal's front, its place in the ideal's, or -1 if
        the stage makes it, and the seconds from it to the end of the step.
    """

    members: tuple[int, ...]
    busy: float  # seconds of its units
    time: float  # with what transfers and unconnected branches cost
    arrivals: list[tuple[int, float]]
    front: list[tuple[int, float]]

    def after(
        self, label: Label, rounds: float, least: float, bound: float
    ) -> Label | None:
        """A way to cut the ideal, with this stage; None if no whole cut from there is
        below the bound. least: seconds that the slowest of the stages to come takes at
        least."""
        # comparisons, not max(): what a search does half a million times
        before, start = label.ends, 0.0
        for i, seconds in self.arrivals:
            if before[i] + seconds > start:
                start = before[i] + seconds
        end, slowest, longest = start + self.busy, label.slowest, label.longest
        if self.time > slowest:
            slowest = self.time
        if end > longest:
            longest = end
        paced = rounds * (slowest if slowest > least else least)
        if paced + longest >= bound:
            return None
        ends = tuple([end if i < 0 else before[i] for i, _ in self.front])
        path = longest
        for at, (_, tail) in zip(ends, self.front, strict=True):
            if at + tail > path:
                path = at + tail
        if paced + path >= bound:
            return None
        return Label(slowest, longest, ends, paced + path, label, self.members)


class TooMany(Exception):
    """The search would take too long."""


# Ways to cut an ideal, by how many stages they have.
Labels = dict[int, list[Label]]


class Step(NamedTuple):
    """A larger ideal.

    members: the units that it adds. seconds: of these.
    joined: whether each is next to one that was added before.
    ready: the units that could be added to it.
    """

    ideal: int
    members: tuple[int, ...]
    seconds: float
    joined: bool
    ready: int


class Search:
    """The best path from the empty ideal to the whole, below a known bound.

    Labels of a path are corrected as in shortest paths with several criteria: a way to
    cut an ideal is dropped once another is as good in all that later stages see, and
    by branch and bound where no way on from it can be shorter than the best cut known.

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
        self.seconds = [unit.seconds for unit in problem.units]
        self.preds = [_mask(problem.graph.predecessors(u)) for u in range(self.count)]
        self.succs = [_mask(problem.graph.successors(u)) for u in range(self.count)]
        self.tail = _tails(problem)
        self.makes: list[list[tuple[int, float]]] = [[] for _ in range(self.count)]
        self.reads: list[list[tuple[int, float]]] = [[] for _ in range(self.count)]
        for edge in problem.edges:
            self.makes[edge.maker].append((_mask(edge.readers), edge.seconds))
            for reader in edge.readers:
                self.reads[reader].append((edge.maker, edge.seconds))
        self.fronts: dict[int, list[tuple[int, float]]] = {}
        self.rests: dict[int, float] = {}
        self.visited = 0
        path = max(self.tail, default=0.0)
        spare = bound - path
        self.slowest = spare / problem.rounds if problem.rounds else float("inf")

    def run(self, order: Sequence[int] | None = None) -> Label | None:
        """The best label of the whole; of ideals that are prefixes of `order`, if it
        is given. None if no cut is below the bound."""
        whole = (1 << self.count) - 1
        start = Label(self.problem.floor, 0.0, (), 0.0, None, ())
        # by size, the ideals that were reached, each after all those inside it
        table: list[dict[int, Labels]] = [{} for _ in range(self.count + 1)]
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
                for step in steps:
                    reached = table[size + len(step.members)]
                    extended = reached.setdefault(step.ideal, {})
                    stage = self._stage(ideal, step)
                    if stage is not None:
                        self._extend(labels, step.ideal, stage, extended)
            table[size] = {}
        ends = table[self.count].get(whole, {}).get(self.stages, [])
        rounds = self.problem.rounds
        return min(ends, key=lambda e: rounds * e.slowest + e.longest, default=None)

    def _prefixes(self, ideal: int, order: Sequence[int], start: int) -> Iterator[Step]:
        step = Step(ideal, (), 0.0, True, 0)
        for unit in order[start:]:
            step = self._added(ideal, step, unit)
            if step.seconds > self.slowest and len(step.members) > 1:
                return
            if self.problem.parts((unit,), step.members):
                return
            yield step

    def _any(self, ideal: int) -> Iterator[Step]:
        ready = [u for u in range(self.count) if not self.preds[u] & ~ideal]
        seen = {ideal}
        stack = [Step(ideal, (), 0.0, True, _mask(ready) & ~ideal)]
        while stack:
            step = stack.pop()
            for unit in _units(step.ready):
                if step.ideal | 1 << unit in seen:
                    continue
                more = step.seconds + self.seconds[unit]
                if more > self.slowest and step.members:
                    continue
                if self.problem.parts((unit,), step.members):
                    continue
                self.visited += 1
                if self.visited > (VISITS // 6 if self.quick else VISITS):
                    raise TooMany
                larger = self._added(ideal, step, unit)
                seen.add(larger.ideal)
                stack.append(larger)
                yield larger

    def _added(self, ideal: int, step: Step, unit: int) -> Step:
        """A step from an ideal with one more unit."""
        bit = 1 << unit
        near = (self.preds[unit] | self.succs[unit]) & step.ideal & ~ideal
        larger, ready = step.ideal | bit, step.ready & ~bit
        for reader in _units(self.succs[unit]):
            if not self.preds[reader] & ~larger:
                ready |= 1 << reader
        return Step(
            larger,
            (*step.members, unit),
            step.seconds + self.seconds[unit],
            step.joined and bool(near or not step.members),
            ready,
        )

    def _front(self, ideal: int) -> list[tuple[int, float]]:
        """Units that others still read, and the seconds from them to the end."""
        if ideal not in self.fronts:
            self.fronts[ideal] = [
                (unit, max(self.tail[r] for r in _units(readers)))
                for unit in range(self.count)
                if ideal >> unit & 1 and (readers := self.succs[unit] & ~ideal)
            ]
        return self.fronts[ideal]

    def _exposed(self, ideal: int, larger: int, stage: Sequence[int]) -> float:
        """Seconds of the transfers that a stage takes part in: of each value that it
        reads, and of each that it makes and others read."""
        first = (unit for unit in stage if self.preds[unit] & ideal)
        read = (maker for unit in first for maker, _ in self.reads[unit])
        exposed = 0.0
        for maker in dict.fromkeys(m for m in read if ideal >> m & 1):
            for readers, seconds in self.makes[maker]:
                if readers & larger & ~ideal:
                    exposed += seconds
        for unit in (unit for unit in stage if self.succs[unit] & ~larger):
            for readers, seconds in self.makes[unit]:
                if readers & ~larger:
                    exposed += seconds
        return exposed

    def _stage(self, ideal: int, step: Step) -> Extension | None:
        """The stage between two ideals; None if it takes too long for the bound."""
        larger, members, busy = step.ideal, step.members, step.seconds
        exposed = self._exposed(ideal, larger, members) * EXPOSED
        if busy + exposed > self.slowest:
            return None
        branches = 0 if step.joined else mixed(self.problem, members, self.heavy)
        time = busy * (1 + MIXED * branches) + exposed
        if time > self.slowest:
            return None
        arrive: dict[int, float] = {}
        for unit in (unit for unit in members if self.preds[unit] & ideal):
            for maker, seconds in self.reads[unit]:
                if ideal >> maker & 1:
                    arrive[maker] = max(arrive.get(maker, 0.0), seconds)
        place = {maker: i for i, (maker, _) in enumerate(self._front(ideal))}
        arrivals = [(place[maker], seconds) for maker, seconds in arrive.items()]
        front = [(place.get(unit, -1), tail) for unit, tail in self._front(larger)]
        return Extension(members, busy, time, arrivals, front)

    def _extend(
        self,
        labels: Labels,
        larger: int,
        stage: Extension,
        extended: Labels,
    ) -> None:
        """Adds to a larger ideal's labels those of an ideal with one more stage."""
        problem = self.problem
        units_left = self.count - larger.bit_count()
        seconds_left = self._rest(larger)
        for k, known in labels.items():
            left = self.stages - k - 1
            if left > units_left or (units_left and not left):
                continue
            if (
                problem.limit is not None
                and problem.memory(stage.members, k) > problem.limit
            ):
                continue
            least = seconds_left / left if left else 0.0
            for label in known:
                new = stage.after(label, problem.rounds, least, self.bound)
                if new is None:
                    continue
                is_kept = self._keep(extended.setdefault(k + 1, []), new)
                if is_kept and not units_left:
                    seconds = problem.rounds * new.slowest + new.longest
                    self.bound = min(self.bound, seconds)

    def _keep(self, labels: list[Label], new: Label) -> bool:
        """Keeps a label unless another beats it, and those that it doesn't beat: the
        Pareto front of ways to cut an ideal."""
        for label in labels:
            if label.beats(new):
                return False
        labels[:] = [label for label in labels if not new.beats(label)]
        labels.append(new)
        if self.quick and len(labels) > FEW:
            labels.remove(max(labels, key=lambda label: label.least))
        return True

    def _rest(self, ideal: int) -> float:
        """Seconds of the units outside of an ideal."""
        if ideal not in self.rests:
            units = enumerate(self.problem.units)
            self.rests[ideal] = sum(u.seconds for i, u in units if not ideal >> i & 1)
        return self.rests[ideal]


def _mask(units: Iterator[int] | Sequence[int]) -> int:
    mask = 0
    for unit in units:
        mask |= 1 << unit
    return mask


def _units(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _tails(problem: Problem) -> list[float]:
    """For each unit the seconds of the longest path from its start to the end."""
    tails = [0.0] * len(problem.units)
    for unit in reversed(list(nx.topological_sort(problem.graph))):
        after = max((tails[r] for r in problem.graph.successors(unit)), default=0.0)
        tails[unit] = problem.units[unit].seconds + after
    return tails
