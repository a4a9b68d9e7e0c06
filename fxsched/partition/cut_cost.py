"""What a cut of a graph into stages is, and the step time that it should have.

A cut gives every unit a stage so that stages do not read each other in a circle. Its
predicted step time is

    rounds * (slowest stage) + (longest path of stages and transfers),

the pipeline formula of Alpa (Zheng et al. 2022, arXiv 2201.12023, eq. 2) with a path in
place of the sum over a chain, as in GraphPipe (Jeon et al. 2024, arXiv 2406.17145).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import networkx as nx

# Work on transfers that does not hide behind computing, as a share of their time.
EXPOSED = 0.25
# What each further unconnected branch in a stage adds to its time: B of the one has to
# wait for readers of the other.
MIXED = 0.2
# An unconnected part of a stage is a branch from this share of the mean stage on.
BRANCH = 0.05


class Unit(NamedTuple):
    """Nodes that stay together, for one microbatch."""

    forward: float  # seconds
    backward: float
    held: float = 0  # bytes between F and B
    weights: float = 0  # bytes of weights and their gradients
    gradients: float = 0  # of these
    state: float = 0  # bytes of the optimizer's state of the weights
    fetch: float = 0  # seconds to send its weights
    temporary: float = 0  # bytes that its jobs take at most while they run

    @classmethod
    def of(cls, units: Sequence[Unit]) -> Unit:
        """Several units as one."""
        temporary = max((unit.temporary for unit in units), default=0)
        sums = map(sum, zip(*units, strict=True)) if units else (0.0, 0.0)
        return cls(*sums)._replace(temporary=temporary)

    @property
    def seconds(self) -> float:
        """Seconds of F and B."""
        return self.forward + self.backward


class Hyperedge(NamedTuple):
    """What a unit makes for others: seconds to send it, and its gradient back."""

    maker: int
    readers: tuple[int, ...]
    there: float
    back: float = 0.0
    bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of both its transfers."""
        return self.there + self.back


Cut = tuple[int, ...]  # the stage of each unit


def never(stage: int) -> bool:
    """That no stage is meant."""
    return False


@dataclass(frozen=True)
class Problem:
    """What to cut, and how a step's time follows from a cut.

    rounds: jobs of one direction that the busiest worker runs, less one.
    floor: seconds up to which no stage counts as slow, since others share its worker.
    apart: pairs of units that may not share a stage.
    in_ring: whether gradients are added up around a ring of workers.
    limit: bytes that a stage may take, in_flight[k] times what is held, its weights,
        what the optimizer keeps of them, and what a job takes while it runs, for the
        k-th stage; None for no limit.
    recomputes: whether B of a stage runs F again.
    """

    units: tuple[Unit, ...]
    edges: tuple[Hyperedge, ...]
    rounds: float
    floor: float = 0.0
    apart: frozenset[tuple[int, int]] = frozenset()
    in_ring: bool = False
    limit: float | None = None
    in_flight: tuple[int, ...] = ()
    recomputes: Callable[[int], bool] = never

    @cached_property
    def graph(self) -> nx.DiGraph[int]:
        """Units, with an edge to each reader of what they make."""
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(len(self.units)))
        graph.add_edges_from((e.maker, r) for e in self.edges for r in e.readers)
        return graph

    @cached_property
    def near(self) -> list[set[int]]:
        """The units that each one reads, and those that read it."""
        graph = self.graph
        return [{*graph.predecessors(u), *graph.successors(u)} for u in graph]

    @cached_property
    def seconds(self) -> float:
        """Seconds of all units."""
        return sum(unit.seconds for unit in self.units)

    def parts(self, some: Iterable[int], others: Sequence[int]) -> bool:
        """Whether some units may not share a stage with others."""
        pairs = ((a, b) for a in some for b in others)
        apart = self.apart
        return bool(apart) and any(p in apart or p[::-1] in apart for p in pairs)

    def memory(self, members: Sequence[int], k: int) -> float:
        """Bytes of the k-th stage, if it has these units."""
        stage = self.stage(members, k)
        held = self.in_flight[k] * stage.held
        return stage.weights + stage.state + held + stage.temporary

    def stage(self, members: Sequence[int], k: int) -> Unit:
        """The k-th stage, if it has these units, as one of them. Where B runs F again,
        what F would save is there while B runs, and what F reads is kept."""
        whole = Unit.of([self.units[u] for u in members])
        if not self.recomputes(k):
            return whole
        inside = set(members)
        edges = {edge for u in members for edge in self.reads[u]}
        read = sum(edge.bytes for edge in edges if edge.maker not in inside)
        return whole._replace(
            backward=whole.backward + whole.forward,
            held=min(whole.held, read),
            temporary=whole.temporary + whole.held,
        )

    @cached_property
    def reads(self) -> list[list[Hyperedge]]:
        """What each unit reads of others."""
        reads: list[list[Hyperedge]] = [[] for _ in self.units]
        for edge in self.edges:
            for reader in edge.readers:
                reads[reader].append(edge)
        return reads


def predicted(problem: Problem, stages: Cut) -> float:
    """The predicted step time of a cut; infinite if it is not allowed."""
    if any(stages[a] == stages[b] for a, b in problem.apart):
        return float("inf")
    count = max(stages) + 1
    busy = [0.0] * count
    before: list[dict[int, float]] = [{} for _ in range(count)]  # stage: seconds to it
    for unit, stage in zip(problem.units, stages, strict=True):
        busy[stage] += unit.seconds
    exposed = [0.0] * count
    for edge in problem.edges:
        maker = stages[edge.maker]
        readers = {stages[r] for r in edge.readers} - {maker}
        if readers:
            exposed[maker] += edge.seconds * EXPOSED
        for reader in readers:
            exposed[reader] += edge.seconds * EXPOSED
            old = before[reader].get(maker, 0.0)
            before[reader][maker] = max(old, edge.seconds)
    quotient: nx.DiGraph[int] = nx.DiGraph()
    quotient.add_nodes_from(range(count))
    quotient.add_edges_from((p, s) for s in range(count) for p in before[s])
    ends: dict[int, float] = {}
    try:
        order = list(nx.topological_sort(quotient))
    except nx.NetworkXUnfeasible:
        return float("inf")
    for stage in order:
        start = max((ends[p] + c for p, c in before[stage].items()), default=0.0)
        ends[stage] = start + busy[stage]
    members: list[list[int]] = [[] for _ in range(count)]
    for number, stage in enumerate(stages):
        members[stage].append(number)
    heavy = BRANCH * problem.seconds / count
    slowest = max(
        b * (1 + MIXED * mixed(problem, inside, heavy)) + e
        for b, inside, e in zip(busy, members, exposed, strict=True)
    )
    return problem.rounds * max(slowest, problem.floor) + max(ends.values())


def mixed(problem: Problem, members: Sequence[int], heavy: float) -> int:
    """How many unconnected parts of these units are heavy, less one."""
    left = set(members)
    count = 0
    while left:
        stack, seconds = [left.pop()], 0.0
        while stack:
            unit = stack.pop()
            seconds += problem.units[unit].seconds
            near = problem.near[unit] & left
            left -= near
            stack += near
        count += seconds >= heavy
    return max(count - 1, 0)
