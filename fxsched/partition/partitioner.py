"""Finds a cut into a given number of stages, for graphs of any size.

Where there are few ideals (a chain, a few branches) the search over all of them is
exact. Elsewhere units are joined until there are few enough, the cuts of one branch
after another give a bound, and units are moved between stages in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heappop, heappush

import networkx as nx

from .cut_cost import Cut, Hyperedge, Problem, Unit, predicted
from .ideal_dp import Label, Search, TooMany

EXACT = 64  # up to so many units none are joined, if there are few ideals
CUTS = 64  # that are remembered: schedules ask for the same ones
CHAIN = 200  # as many of a chain
IDEALS = 300
GRAIN = 40  # units of a stage, about
LEADERS = 200  # units of a stage that others move along with, at most


@lru_cache(CUTS)
def best_cut(problem: Problem, stages: int) -> Cut | None:
    """The cut into this many stages with the least predicted step time; None if none is
    allowed."""
    fine, of = problem, tuple(range(len(problem.units)))
    chain = all(degree <= 2 for _, degree in problem.graph.degree)
    most = max(CHAIN if chain else EXACT, stages)
    small = len(problem.units) <= most and _few(problem)
    if not small:
        fine, of = join_light(problem, problem.seconds / (GRAIN * stages), stages)
    order = depth_first(fine)
    best = _even(fine, order, stages)
    bound = predicted(fine, best) if best else float("inf")
    candidate = _cut(Search(fine, stages, bound, not small).run(order), len(fine.units))
    if candidate is not None:
        best, bound = candidate, predicted(fine, candidate)
    coarse, inner = fine, tuple(range(len(fine.units)))
    threshold = fine.seconds / (GRAIN * stages)
    while True:
        if _few(coarse):
            try:
                label = Search(coarse, stages, bound, not small).run()
            except TooMany:
                pass
            else:
                candidate = _cut(label, len(coarse.units))
                if candidate is not None:
                    best = tuple(candidate[c] for c in inner)
                break
        threshold *= 1.5
        size = len(coarse.units)
        coarse, inner = join_light(fine, threshold, stages)
        if len(coarse.units) == size and threshold > fine.seconds:
            break
    if best is None:
        return None
    if not small:
        best = improve(fine, best, lambda cut: predicted(fine, cut))
    return tuple(best[c] for c in of)


def _cut(label: Label | None, count: int) -> Cut | None:
    """Stages in the order in which the search made them."""
    if label is None:
        return None
    parts = []
    while label.before is not None:
        parts.append(label.members)
        label = label.before
    stages = [0] * count
    for number, members in enumerate(reversed(parts)):
        for unit in members:
            stages[unit] = number
    return tuple(stages)


def _few(problem: Problem) -> bool:
    """Whether there are few enough ideals to search all of them."""
    graph = problem.graph
    preds = [sum(1 << p for p in graph.predecessors(u)) for u in graph]
    seen = {0}
    stack = [0]
    while stack:
        ideal = stack.pop()
        for unit, before in enumerate(preds):
            larger = ideal | 1 << unit
            if larger not in seen and not before & ~ideal:
                seen.add(larger)
                stack.append(larger)
        if len(seen) > IDEALS + len(preds):
            return False
    return True


def depth_first(problem: Problem) -> list[int]:
    """Units in an order of data flow that finishes one branch before the next, the
    branch with the longest path of work first."""
    graph = problem.graph
    depth = [0.0] * len(problem.units)
    for unit in nx.topological_sort(graph):
        before = max((depth[p] for p in graph.predecessors(unit)), default=0.0)
        depth[unit] = problem.units[unit].seconds + before
    order: dict[int, None] = {}
    ends = sorted(
        (u for u in graph if not graph.out_degree(u)), key=lambda u: (-depth[u], u)
    )
    stack = [(unit, False) for unit in reversed(ends)]
    while stack:
        unit, done = stack.pop()
        if done:
            order[unit] = None
        elif unit not in order:
            stack.append((unit, True))
            ahead = sorted(graph.predecessors(unit), key=lambda p: (depth[p], -p))
            stack += [(p, False) for p in ahead if p not in order]
    return list(order)


def _even(problem: Problem, order: Sequence[int], stages: int) -> Cut | None:
    """A quick cut along an order into parts of about equal work."""
    cut = [0] * len(order)
    done, stage, inside = 0.0, 0, 0
    share = problem.seconds / stages
    for i, unit in enumerate(order):
        seconds = problem.units[unit].seconds
        left = stages - stage - 1
        full = done + seconds / 2 > share * (stage + 1)
        if inside and left and (full or len(order) - i <= left):
            stage, inside = stage + 1, 0
        cut[unit] = stage
        inside += 1
        done += seconds
    assigned = tuple(cut)
    return assigned if allowed(problem, assigned) else None


def allowed(problem: Problem, cut: Cut) -> bool:
    """Whether stages read each other in no circle, part what they must and keep the
    limit."""
    if any(cut[a] == cut[b] for a, b in problem.apart) or not _flows(problem, cut):
        return False
    if problem.limit is None:
        return True
    return all(
        problem.memory([u for u, s in enumerate(cut) if s == stage], stage)
        <= problem.limit
        for stage in range(max(cut) + 1)
    )


def improve(
    problem: Problem, cut: Cut, seconds: Callable[[Cut], float], tries: int = 2000
) -> Cut:
    """Moves units to the stage of a neighbour while that saves time: each with those of
    its stage that flow into it, or those that it flows into.

    seconds: of a cut's step; infinite for what is not worth a try.
    """
    best = seconds(cut)
    moved = True
    while moved and tries > 0:
        moved = False
        for unit in range(len(cut)):
            for new in _moves(problem, cut, unit):
                if tries <= 0 or not allowed(problem, new):
                    continue
                time = seconds(new)
                tries -= time < float("inf")
                if time < best * (1 - 1e-6):
                    cut, best, moved = new, time, True
                    break
    return cut


def _moves(problem: Problem, cut: Cut, unit: int) -> Iterator[Cut]:
    """Cuts with a unit, and what of its stage is before it or after it, moved to a
    stage next to these. Light units lead no others: a heavier one near them does."""
    graph = problem.graph
    light = problem.units[unit].seconds < problem.seconds / (LEADERS * len(set(cut)))
    for near in (graph.predecessors, graph.successors):
        group, stack, stages = {unit}, [unit], set[int]()
        while stack and not (light and len(group) > 1):
            for other in near(stack.pop()):
                if cut[other] != cut[unit]:
                    stages.add(cut[other])
                elif other not in group:
                    group.add(other)
                    stack.append(other)
        if len(group) < cut.count(cut[unit]) and not (light and len(group) > 1):
            for stage in sorted(stages):
                yield tuple(stage if u in group else s for u, s in enumerate(cut))


def _flows(problem: Problem, cut: Cut) -> bool:
    """Whether no stages read each other in a circle."""
    edges = {(cut[a], cut[b]) for a, b in problem.graph.edges}
    quotient: nx.DiGraph[int] = nx.DiGraph((a, b) for a, b in edges if a != b)
    return nx.is_directed_acyclic_graph(quotient)


def join_light(
    problem: Problem, threshold: float, least: int
) -> tuple[Problem, tuple[int, ...]]:
    """Joins units of less than `threshold` seconds to a neighbour, down to `least`.

    Gives the smaller problem, and which of its units each unit is in. A unit joins the
    side that leaves fewer seconds of transfers at the place where it could be cut.
    """
    return _Joining(problem).run(threshold, least)


class _Joining:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        graph = problem.graph
        count = len(problem.units)
        self.members = {u: [u] for u in range(count)}
        self.seconds = {u: problem.units[u].seconds for u in range(count)}
        self.preds = {u: set(graph.predecessors(u)) for u in range(count)}
        self.succs = {u: set(graph.successors(u)) for u in range(count)}
        self.position = {u: i for i, u in enumerate(depth_first(problem))}
        self.makes: list[list[Hyperedge]] = [[] for _ in range(count)]
        self.reads: list[list[Hyperedge]] = [[] for _ in range(count)]
        for edge in problem.edges:
            self.makes[edge.maker].append(edge)
            for reader in edge.readers:
                self.reads[reader].append(edge)

    def run(self, threshold: float, least: int) -> tuple[Problem, tuple[int, ...]]:
        heap = [(s, u) for u, s in self.seconds.items() if s < threshold]
        heapify(heap)
        while heap and len(self.members) > least:
            seconds, unit = heappop(heap)
            if self.seconds.get(unit) != seconds:
                continue
            partner = self._partner(unit)
            if partner is None:
                continue
            self._join(partner, unit)
            if self.seconds[partner] < threshold:
                heappush(heap, (self.seconds[partner], partner))
        return self._result()

    def _partner(self, unit: int) -> int | None:
        """The lightest neighbour on the better side that it can join."""
        before = [
            p
            for p in self.preds[unit]
            if len(self.succs[p]) == 1 or len(self.preds[unit]) == 1
        ]
        after = [
            s
            for s in self.succs[unit]
            if len(self.preds[s]) == 1 or len(self.succs[unit]) == 1
        ]
        sides = [before, after] if self._cheap_after(unit) else [after, before]
        sides.append(self._siblings(unit))
        for side in sides:
            mine, parts = self.members[unit], self.problem.parts
            able = [p for p in side if not parts(mine, self.members[p])]
            if able:
                return min(able, key=lambda p: (self.seconds[p], p))
        return None

    def _cheap_after(self, unit: int) -> bool:
        """Whether a cut after a unit crosses no more than one before it."""
        inside = set(self.members[unit])
        last = max(self.position[m] for m in inside)
        read = {
            edge for m in inside for edge in self.reads[m] if edge.maker not in inside
        }
        before = sum(v.seconds for v in read)
        after = sum(
            v.seconds for v in read if any(self.position[r] > last for r in v.readers)
        ) + sum(
            v.seconds
            for m in inside
            for v in self.makes[m]
            if not inside.issuperset(v.readers)
        )
        return after <= before

    def _siblings(self, unit: int) -> list[int]:
        """Others that read the same units and are read by the same."""
        near = {s for p in self.preds[unit] for s in self.succs[p]}
        return [
            other
            for other in near - {unit}
            if self.preds[other] == self.preds[unit]
            and self.succs[other] == self.succs[unit]
        ]

    def _join(self, into: int, unit: int) -> None:
        self.members[into] += self.members.pop(unit)
        self.seconds[into] += self.seconds.pop(unit)
        for pred in self.preds.pop(unit):
            self.succs[pred].discard(unit)
            if pred != into:
                self.succs[pred].add(into)
                self.preds[into].add(pred)
        for succ in self.succs.pop(unit):
            self.preds[succ].discard(unit)
            if succ != into:
                self.preds[succ].add(into)
                self.succs[into].add(succ)

    def _result(self) -> tuple[Problem, tuple[int, ...]]:
        whole = sorted(self.members.values(), key=min)
        of = [0] * len(self.problem.units)
        for number, members in enumerate(whole):
            for unit in members:
                of[unit] = number
        return joined(self.problem, whole), tuple(of)


def joined(problem: Problem, members: Sequence[Sequence[int]]) -> Problem:
    """The problem of larger units, each of these members."""
    of = {unit: place for place, units in enumerate(members) for unit in units}
    edges = []
    for edge in problem.edges:
        readers = tuple(sorted({of[r] for r in edge.readers} - {of[edge.maker]}))
        if readers:
            edges.append(edge._replace(maker=of[edge.maker], readers=readers))
    return replace(
        problem,
        units=tuple(Unit.of([problem.units[u] for u in some]) for some in members),
        edges=tuple(edges),
        apart=frozenset((of[a], of[b]) for a, b in problem.apart),
    )


def part_of(problem: Problem, part: Sequence[int]) -> Problem:
    """The problem of some of its units alone."""
    new = {unit: i for i, unit in enumerate(part)}
    edges = []
    for edge in problem.edges:
        readers = tuple(new[r] for r in edge.readers if r in new)
        if edge.maker in new and readers:
            edges.append(edge._replace(maker=new[edge.maker], readers=readers))
    apart = {(new[a], new[b]) for a, b in problem.apart if a in new and b in new}
    units = tuple(problem.units[u] for u in part)
    return replace(problem, units=units, edges=tuple(edges), apart=frozenset(apart))
