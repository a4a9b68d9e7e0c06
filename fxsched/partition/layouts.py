"""Searches for the cut of a model, and the workers of its stages, at the same time.

A layout says the stage of each unit, the workers of each stage, and in which order jobs
run. Simulated annealing (Kirkpatrick et al. 1983, Optimization by Simulated Annealing)
changes it: a unit moves to a neighbour's stage, a stage to another worker, two stages
change places, a stage is cut in two or joined with a neighbour, or is computed by two
workers in turns. The clock times each layout, and a limit of memory is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import nsmallest
from math import inf, log
from operator import add
from random import Random
from typing import Any, NamedTuple

import networkx as nx

from ..accounts.paper import held_memory
from ..clock.joint import fit_joint, flow_order
from ..clock.stage_graph import run_stages, stage_jobs
from ..clock.timeline import Timeline
from ..jobs.job import Direction, Job, Placement
from ..jobs.own_caps import OwnCaps
from ..jobs.schedule import Schedule
from ..schedules.graph_schedule import longest_way_first, stage_depths
from ..schedules.orders import oldest_microbatch_first
from .cut_cost import Cut, Problem
from .job_orders import JobOrders, Ordered
from .layout_moves import Layout, Moves, Place
from .partitioner import join_light, joined, part_of
from .planner import stage_graph

UNITS = 160  # a unit has at least this part of the model's work, where it can
# Jobs to run on the clock: for each unit, and at least; a layout counts as some more.
BUDGET, LEAST, MANY = 31_000, 800_000, 16
PER_LAYOUT = 150  # that a layout counts besides its jobs
# Of a step, what a change may cost at first; more where units are few and large.
HEAT, HEAT_OF_UNIT = 0.02, 0.4
CLOSE = 0.002  # to the shortest step that can be, from which no search goes on
WORTH = 0.005  # share of a step that a search must save
MUCH = 0.1  # from this possible saving on, a search has the whole budget
FLOOR = 0.3  # the least share of the budget
PRICE = 3  # of a step, times the share of the limit that a worker holds above it
CHAINS = 3  # starts that are walked from
# Then orders of few jobs are walked: how many jobs run on the clock, of which the share
# FIRST is for SHORT changes of each of STARTS layouts, the rest for the best of them.
ORDERED, FIRST, SHORT, STARTS, FINISHED = 14e6, 0.7, 3000, 50, 4
FEW_JOBS, MANY_JOBS = 100, 200  # of which units are stages, and that are walked
WORTH_ORDER = 0.01  # share of a step that an order must save
LATE = 1 << 40  # more than any n of F and B


class Made(NamedTuple):
    """The schedule of a layout, its stages, their units, and the workers of each."""

    schedule: Schedule
    stages: nx.DiGraph[int]
    cut: Cut
    workers: Sequence[Sequence[int]]


class Ran(NamedTuple):
    """A layout on the clock."""

    seconds: float
    made: Made
    events: Timeline


class _Walk(NamedTuple):
    """Where a walk is; cost: seconds, and more if a worker holds too much."""

    cost: float
    seconds: float
    layout: Layout


class Found(NamedTuple):
    """A layout with its stages and schedule; tried: how many were simulated."""

    cut: Cut
    schedule: Schedule
    stages: nx.DiGraph[int]
    seconds: float
    tried: int


# What a layout's schedule is made of is data, which the plan cache can keep.


@dataclass(frozen=True)
class InTurns:
    """A w: workers take the microbatches of a stage in turns."""

    runs: tuple[tuple[Placement, ...], ...]

    def __call__(self, s: int, b: int, d: Direction) -> Placement:
        own = self.runs[s]
        return own[b % len(own)]


@dataclass(frozen=True)
class InSteps:
    """An n that grows by the same from each microbatch to the next; W comes last."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    each: int

    def __call__(self, s: int, b: int, d: Direction) -> int:
        if d is Direction.WEIGHT:
            return LATE + b
        first = self.forward if d is Direction.FORWARD else self.backward
        return first[s] + self.each * b


@dataclass(frozen=True)
class CapOf:
    """A cap for each stage."""

    caps: tuple[int | None, ...]

    def __call__(self, s: int) -> int | None:
        return self.caps[s]


@dataclass
class Layouts:
    """Layouts of units, and what the clock says of them.

    asked: the schedule that is looked for, with workers and microbatches.
    phases: how often rows of the batch meet before each unit; a stage has units of one
        phase. whole: the global-batch units, by the stage that each is in.
    limit: of bytes that a worker may hold, maybe infinite. effort: how long to search;
        with 1, some seconds.
    """

    problem: Problem
    asked: Schedule
    phases: Sequence[int]
    whole: Sequence[Sequence[int]]
    limit: float
    effort: float = 1.0
    tried: int = field(default=0, init=False)
    seen: dict[tuple[Any, ...], _Walk] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Joins light units, those of each phase among themselves."""
        self.fine = self.problem
        kind = {u: -1 - i for i, units in enumerate(self.whole) for u in units}
        kinds = [kind.get(u, phase) for u, phase in enumerate(self.phases)]
        of = [0] * len(kinds)
        members: list[list[int]] = []
        for each in dict.fromkeys(kinds):
            inside = [u for u, k in enumerate(kinds) if k == each]
            parts = [0] * len(inside)
            if each >= 0:
                least = self.fine.seconds / UNITS
                _, places = join_light(part_of(self.fine, inside), least, 1)
                parts = list(places)
            for u, place in zip(inside, parts, strict=True):
                of[u] = len(members) + place
            members += [[] for _ in range(max(parts) + 1)]
        for u, place in enumerate(of):
            members[place].append(u)
        self.of, self.members = of, members
        self.problem = joined(self.fine, members)
        self.kinds = [kinds[units[0]] for units in members]
        self.budget = self.effort * max(BUDGET * len(members), LEAST)
        self.budget *= 1 + self.asked.workers / MANY

    @cached_property
    def _least(self) -> float:
        """A step that none is shorter than: work, evenly shared."""
        times = self._times
        work = sum(
            u.seconds * k for u, k in zip(self.problem.units, times, strict=True)
        )
        return work / self.asked.workers

    @cached_property
    def _times(self) -> list[int]:
        """How often each unit runs in each direction."""
        return [1 if kind < 0 else self.asked.microbatches for kind in self.kinds]

    @cached_property
    def moves(self) -> Moves:
        """What changes layouts."""
        return Moves(self.problem, self.kinds, self.order, self.asked.workers)

    @cached_property
    def order(self) -> list[int]:
        """The units in an order of data flow."""
        return list(nx.lexicographical_topological_sort(self.problem.graph))

    def start(
        self, cut: Sequence[int], schedule: Schedule, stages: nx.DiGraph[int]
    ) -> Layout | None:
        """The layout nearest to a schedule for stages, of a cut of the fine units; None
        if there is none, as where weights move."""
        coarse, graph = [0] * len(self.members), self.problem.graph
        place = {s: i for i, s in enumerate(flow_order(stages))}
        for unit in self.order:  # in the stage of most of it, or a later one
            share: dict[int, float] = {}
            for u in self.members[unit]:
                share[cut[u]] = share.get(cut[u], 0.0) + self.fine.units[u].seconds
            of = max(share, key=share.__getitem__)
            before = (coarse[p] for p in graph.predecessors(unit))
            coarse[unit] = max([of, *before], key=place.__getitem__)
        workers: dict[int, tuple[int, ...]] = {}
        for s in sorted(set(coarse)):
            own = self._workers(schedule, s)
            if own is None:
                return None
            workers[s] = own
        new = {s: i for i, s in enumerate(workers)}
        depth = stage_depths(stages)
        caps = {s: schedule.cap(s) for s in workers}
        places = (
            Place(own, None if (cap := caps[s]) is None else cap - depth[s])
            for s, own in workers.items()
        )
        layout = Layout(tuple(new[s] for s in coarse), tuple(places), True)
        return layout if self.order_of(layout) is not None else None

    def _workers(self, schedule: Schedule, stage: int) -> tuple[int, ...] | None:
        """The workers that take microbatches of a stage in turns."""
        every = range(schedule.microbatches)
        places = {
            d: [schedule.place(Job(stage, b, d)) for b in every]
            for d in schedule.directions
        }
        runs = [place.compute for place in places[Direction.FORWARD]]
        count = next((k for k in range(1, len(runs)) if runs[k] == runs[0]), len(runs))
        group = tuple(runs[:count])
        same = all(
            place == (group[b % count], group[b % count], None)
            for each in places.values()
            for b, place in enumerate(each)
        )
        return group if same and len(set(group)) == count else None

    def order_of(self, layout: Layout) -> list[int] | None:
        """Its stages in an order of data flow, global-batch ones last; None for a
        circle, and for units that may not share a stage."""
        cut, kinds = layout.cut, self.kinds
        if any(cut[a] == cut[b] for a, b in self.problem.apart):
            return None
        stages: nx.DiGraph[int] = nx.DiGraph()
        stages.add_nodes_from(range(len(layout.places)))
        graph = self.problem.graph
        stages.add_edges_from(
            (cut[a], cut[b]) for a, b in graph.edges if cut[a] != cut[b]
        )
        try:
            order = list(nx.lexicographical_topological_sort(stages))
        except nx.NetworkXUnfeasible:
            return None
        whole = {cut[u] for u, kind in enumerate(kinds) if kind < 0}
        return [s for s in order if s not in whole] + sorted(whole)

    def made(self, layout: Layout) -> Made | None:
        """The schedule and the stages of a layout; None if it can't be."""
        order, wanted = self.order_of(layout), self.asked.stages
        if order is None or wanted not in (None, len(order)):
            return None
        new = {s: i for i, s in enumerate(order)}
        cut = tuple(new[s] for s in layout.cut)
        stages = stage_graph(self.problem, cut)
        for u, kind in enumerate(self.kinds):
            if kind < 0:
                stages.nodes[cut[u]]["joint"] = True
        places = [layout.places[s] for s in order]
        schedule = fit_joint(self._schedule(layout, places, stages), stages)
        return Made(schedule, stages, cut, [place.workers for place in places])

    def _schedule(
        self, layout: Layout, places: Sequence[Place], stages: nx.DiGraph[int]
    ) -> Schedule:
        microbatches, depth = self.asked.microbatches, stage_depths(stages)
        runs = (tuple(Placement(k, k) for k in place.workers) for place in places)
        first = oldest_microbatch_first(len(stages))
        apart = each = 2 * len(stages)
        if layout.longest:
            first = longest_way_first(stages, microbatches)
            apart, each = microbatches, 1
        forward, backward = (
            [first(s, 0, d) for s in stages]
            for d in (Direction.FORWARD, Direction.BACKWARD)
        )
        late = [apart * place.lead for place in places]
        n = InSteps(tuple(map(add, forward, late)), tuple(backward), each)
        caps = (
            None if place.more is None else max(1, depth[s] + place.more)
            for s, place in enumerate(places)
        )
        return replace(
            self.asked,
            stages=len(stages),
            w=InTurns(tuple(runs)),
            n=n,
            in_flight=OwnCaps(CapOf(tuple(caps))),
            fit=None,
            candidates=(),
        )

    def run(self, layout: Layout) -> Ran | None:
        """Runs a layout on the clock; None if it can't be, or in_flight stops it."""
        made = self.made(layout)
        return None if made is None else self._ran(made)

    def _ran(self, made: Made) -> Ran | None:
        schedule, stages, _, workers = made
        self.tried += 1
        self.budget -= PER_LAYOUT + 2 * len(stages) * schedule.microbatches
        events = run_stages(schedule, stages)
        if not events.complete:
            return None
        end = max(events.end, default=0.0)
        copied = [s for s, own in enumerate(workers) if len(own) > 1]
        if copied:  # gradients are sent to one worker, which adds them up
            jobs, last = events.jobs, [0.0] * len(stages)
            stage = [s for s, _ in jobs.kinds]
            for job, ends in zip(events.order, events.end, strict=True):
                s = stage[jobs.kind[job]]
                last[s] = max(last[s], ends)
            end = max(end, *(last[s] + stages.nodes[s]["fetch"] for s in copied))
        return Ran(end, made, events)

    def _work(self, layout: Layout) -> float:
        """Seconds of all jobs of the worker that has most to do."""
        load, units = [0.0] * self.asked.workers, self.problem.units
        for unit, stage, often in zip(units, layout.cut, self._times, strict=True):
            own = layout.places[stage].workers
            for worker in own:
                load[worker] += unit.seconds * often / len(own)
        return max(load)

    def cost(self, ran: Ran) -> float:
        """Seconds, and PRICE times the share of them that a worker holds above the
        limit."""
        if self.limit == inf:
            return ran.seconds
        schedule, stages, *_ = ran.made
        held = held_memory(schedule, stages, ran.events)
        most = max(memory.total for memory in held)
        return ran.seconds * (1 + PRICE * max(0.0, most / self.limit - 1))

    # The search

    def search(
        self, starts: Sequence[Layout], random: Random, known: float = inf
    ) -> Found | None:
        """The best layout that is found from these; None if all hold too much, and if
        none can be shorter by WORTH than a known step, the best candidate's."""
        room = known * (1 - WORTH) / self._least - 1 if self._least else inf
        if room <= 0:
            return None
        share = min(max(room / MUCH, FLOOR), 1.0)
        self.budget *= share
        chains = []
        for start in starts:
            ran = self.run(start)
            if ran is not None:
                chains.append(self._noted(ran, start))
        chains.sort(key=_cost)
        best, total = None, self.budget
        for i, walk in enumerate(chains[:CHAINS]):
            found = self._anneal(walk, total * (1 - 0.2 * (i + 1)), random)
            best = found if best is None else min(best, found, key=_cost)
        if best is None:
            return None
        best = min(best, self._anneal(best, 0.0, random), key=_cost)
        ran = self.run(best.layout) if best.cost <= best.seconds else None
        known, budget = inf if ran is None else best.seconds, self.effort * share
        ran = self._in_order(known, budget * ORDERED, random) or ran
        if ran is None:
            return None
        schedule, stages, cut, _ = ran.made
        fine = tuple(cut[unit] for unit in self.of)
        return Found(fine, schedule, stages, ran.seconds, self.tried)

    def _noted(self, ran: Ran, layout: Layout) -> _Walk:
        """The layout with its cost, which is kept if it is the least of its kind."""
        walk = _Walk(self.cost(ran), ran.seconds, layout)
        key = layout.cut, *(place.workers for place in layout.places)
        if self._few:  # where cuts don't matter
            key = tuple(layout.places[s].workers for s in layout.cut)
        if key not in self.seen or walk.cost < self.seen[key].cost:
            self.seen[key] = walk
        return walk

    @cached_property
    def _few(self) -> bool:
        """Whether each unit can be a stage."""
        jobs = sum(self._times) * len(self.asked.directions)
        return jobs <= FEW_JOBS and not self.whole and self.asked.stages is None

    def _in_order(self, known: float, budget: float, random: Random) -> Ran | None:
        """The layout with the best order of jobs that is found; None if it isn't
        shorter than a known step by WORTH_ORDER. budget: jobs on the clock."""
        if known <= self._least * (1 + WORTH_ORDER):
            return None
        walked: list[tuple[Ordered, JobOrders, Made]] = []
        for walk in nsmallest(STARTS, self.seen.values(), key=_cost_alone):
            ran = self.run(walk.layout)
            assert ran is not None, "it ran before"
            made, regular = ran.made, ran.events.jobs.regular
            order = [j for j in ran.events.order if j < regular]  # without updates
            if self._few:
                made, order = self._fine(ran, order)
            if len(order) > MANY_JOBS:
                continue
            jobs = JobOrders(made.schedule, made.stages, self.limit)
            runs = tuple(map(tuple, made.workers))
            walked.append((jobs.walk(runs, order, SHORT, random), jobs, made))
            if len(walked) * SHORT * len(order) > budget * FIRST:
                break
        if not walked:
            return None
        walked.sort(key=_seconds)
        for ordered, jobs, made in walked[:FINISHED]:
            changes = int(budget * (1 - FIRST) / FINISHED / len(ordered.order))
            again = jobs.walk(ordered.runs, ordered.order, changes, random)
            walked.append((again, jobs, made))
        ordered, jobs, made = min(walked, key=_seconds)
        if ordered.seconds > known * (1 - WORTH_ORDER):
            return None
        w = InTurns(tuple(tuple(Placement(k, k) for k in own) for own in ordered.runs))
        n = jobs.in_order(ordered.order)
        schedule = replace(made.schedule, w=w, n=n, in_flight=None, in_order=True)
        made = made._replace(schedule=schedule, workers=ordered.runs)
        ran = self._ran(made)
        return ran if ran is not None and self.cost(ran) <= ran.seconds else None

    def _fine(self, ran: Ran, order: Sequence[int]) -> tuple[Made, list[int]]:
        """Each unit as a stage, and an order of jobs as one of theirs."""
        cut, old = ran.made.cut, ran.events.jobs
        where = [Place(tuple(ran.made.workers[s])) for s in cut]
        made = self.made(Layout(tuple(range(len(cut))), tuple(where)))
        assert made is not None, "units don't read each other in a circle"
        jobs = stage_jobs(made.schedule, made.stages)
        inside: list[list[int]] = [[] for _ in ran.made.workers]
        for u in self.order:
            inside[cut[u]].append(made.cut[u])
        fine = []
        for s, b, d in map(old.job, order):
            units = inside[s] if d is Direction.FORWARD else inside[s][::-1]
            kinds = (jobs.at.get((u, d)) for u in units)  # some have no B
            fine += [jobs.find(kind, b) for kind in kinds if kind is not None]
        return made, fine

    def _anneal(self, start: _Walk, left: float, random: Random) -> _Walk:
        """The best layout on a walk; left: what stays of the budget."""
        best = now = start
        hottest = HEAT + HEAT_OF_UNIT / len(self.members)
        total = self.budget - left
        while self.budget > left and best.cost > self._least * (1 + CLOSE):
            heat = hottest * best.cost * ((self.budget - left) / total) ** 2
            changed = self.moves.changed(now.layout, random)
            most = now.cost - heat * log(1.0 - random.random())
            if changed is None or self._work(changed) > most:
                self.budget -= PER_LAYOUT / 5
                continue
            ran = self.run(changed)
            if ran is None or ran.seconds > most:
                continue
            walk = self._noted(ran, changed)
            if walk.cost <= most:
                now, best = walk, min(best, walk, key=_cost)
        return best


def _cost(walk: _Walk) -> tuple[bool, float]:
    """Those within the limit are better than all others."""
    return walk.cost > walk.seconds, walk.cost


def _cost_alone(walk: _Walk) -> float:
    return walk.cost


def _seconds(walked: tuple[Ordered, JobOrders, Made]) -> float:
    return walked[0].seconds
