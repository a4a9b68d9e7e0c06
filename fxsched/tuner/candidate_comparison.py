"""Schedules against each other on the simulator's clock."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

import networkx as nx

from ..accounts.paper import held_memory
from ..clock.network import Transfer
from ..draw import tables
from ..draw.palette import clock
from ..jobs.job import PlanError
from ..jobs.own_caps import OwnCaps
from ..jobs.schedule import Schedule
from ..schedules.orders import oldest_microbatch_first
from ..simulator.simulate import Simulation, simulate
from .candidates import Candidate, library, moves_weights, placements
from .evaluate_order import CLOSE, Orders, caps, ranks
from .local_search import Budget, Climber, climb
from .ordering_problem import OrderingProblem, make_problem
from .stage_costs import Costs

FINALISTS = 3  # placements whose best order is compared


class Row(NamedTuple):
    """A schedule and its step; memory: of the worker that holds the most."""

    candidate: Candidate
    simulation: Simulation
    memory: float


class Goal(NamedTuple):
    """What is looked for; limit: of memory, maybe infinite. See fxsched.search."""

    workers: int
    microbatches: int
    limit: float
    transfer: Transfer
    objective: str
    split_backward: bool
    prefetch: int | None
    kept: float


@dataclass
class Comparison:
    """Compares the library, then looks for orders on its placements.

    tell: is told the share of the work that is done.
    """

    costs: Costs
    goal: Goal
    tell: Callable[[float], object] = lambda share: None
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def run(self, random: Random, jobs: float) -> None:
        """jobs: how many to run on clocks in looking for orders."""
        candidates = self._library()
        for candidate in candidates:
            self.enter(candidate)
            self.tell(0.5 / len(candidates))
        budget = Budget(jobs, lambda spent: self.tell(0.5 * spent / jobs))
        climbers = []
        places = placements(
            candidates, self.costs.graphs, self.goal.workers, self.goal.microbatches
        )
        for name, schedule, stages in places:
            problem = self._problem(name, schedule, stages)
            if problem is not None:
                climbers.append((Climber(problem, self.goal.objective, budget), stages))
        climb([climber for climber, _ in climbers], random, budget)
        climbers.sort(key=lambda pair: pair[0].best)
        for climber, stages in climbers[:FINALISTS]:
            if climber.orders is not None:
                self.enter(_searched(climber.problem, climber.orders, stages))
        if not any(map(self.fits, self.rows)):
            for name, schedule, stages in places:
                self.enter(_one_at_a_time(name, schedule, stages))

    def _library(self) -> list[Candidate]:
        moves = self.goal.prefetch is not None
        candidates, out = [], dict[str, None]()
        for each in library(
            self.goal.workers, self.goal.microbatches, self.costs.graphs, moves
        ):
            if each.schedule.split_backward and not self.goal.split_backward:
                continue
            if not moves and moves_weights(each.schedule, each.stages):
                out[each.name] = None
            else:
                candidates.append(each)
        self.left_out = list(out)
        return candidates

    def _problem(
        self, name: str, schedule: Schedule, stages: nx.DiGraph[int]
    ) -> OrderingProblem | None:
        """The jobs of a placement, in no order yet."""
        bare = Schedule(
            self.goal.workers,
            self.goal.microbatches,
            len(stages),
            schedule.w,
            name=name,
            split_backward=self.goal.split_backward,
        )
        return make_problem(
            bare, stages, self.goal.transfer, self.goal.kept, self.goal.limit
        )

    def enter(self, candidate: Candidate) -> None:
        """Simulates a schedule, and compares it if it comes to an end."""
        schedule, stages = candidate.schedule, candidate.stages
        try:
            simulation = simulate(
                schedule, stages, None, self.goal.transfer, self.goal.prefetch
            )
        except PlanError:
            return  # such as a cap that stops it here
        held = held_memory(
            schedule, simulation.stages, simulation.timeline, self.goal.kept
        )
        most = max(memory.total for memory in held)
        self.rows.append(Row(candidate, simulation, most))

    def fits(self, row: Row) -> bool:
        """Whether a candidate is within the memory limit."""
        return row.memory <= self.goal.limit * (1 + CLOSE)

    def length(self, row: Row) -> float:
        """What a candidate is judged by."""
        latency = self.goal.objective == "latency"
        return row.simulation.latency if latency else row.simulation.span

    def best(self) -> Row:
        """The shortest within the limit; of equals, the first.

        Raises PlanError if there is none.
        """
        within = [row for row in self.rows if self.fits(row)]
        if within:
            least = min(map(self.length, within)) * (1 + CLOSE)
            return next(row for row in within if self.length(row) <= least)
        assert self.rows, "one microbatch at a time always comes to an end"
        lowest = min(self.rows, key=lambda row: row.memory)
        raise PlanError(
            f"search(memory_limit={self.goal.limit:g}): every schedule holds more on "
            f"some worker; the least found is {lowest.memory:g} "
            f"{'bytes' if self.costs.bytes else 'activations'}, of "
            f"{_title(lowest.candidate)} in {len(lowest.candidate.stages)} stages; "
            "raise the limit, or use more workers or smaller microbatches"
        )

    def table(self, best: Row) -> str:
        """What was compared, within the limit and shortest first."""
        unit = "bytes" if self.costs.bytes else "activations"
        line = f"{self.goal.workers} workers, {self.goal.microbatches} microbatches"
        if self.goal.limit < float("inf"):
            line += f", at most {self.goal.limit:g} {unit} a worker"
        rows = sorted(self.rows, key=lambda r: (not self.fits(r), self.length(r)))
        cells = [self._cells(row, best) for row in rows]
        memory = "memory" if self.costs.bytes else "activations"
        headers = f"schedule|stages|step|span|bubble|{memory}|"
        parts = [line, tables.table(headers, cells, "lrrrrrl", tables.WIDTH)]
        if self.left_out:
            out = (
                "not compared, since they move weights or gradients and prefetch isn't "
                f"given: {', '.join(self.left_out)}"
            )
            parts.append("\n".join(textwrap.wrap(out, tables.WIDTH)))
        return "\n\n".join(parts)

    def _cells(self, row: Row, best: Row) -> tuple[str, ...]:
        """A row of the table; the bubble is that of what is made short."""
        step, latency = row.simulation, self.goal.objective == "latency"
        bubble = step.bubble_rate if latency else step.span_bubble_rate
        write = tables.byte_text if self.costs.bytes else "{:.4g}".format
        time = clock(best.simulation.latency, self.costs.unit)
        return (
            _title(row.candidate),
            f"{len(row.candidate.stages)}",
            *(
                f"{t * time.factor:.6g} {time.unit}".strip()
                for t in (step.latency, step.span)
            ),
            f"{100 * bubble:.2f} %",
            write(row.memory),
            "best" if row is best else "" if self.fits(row) else "over",
        )


def _title(candidate: Candidate) -> str:
    return " ".join(filter(None, (candidate.name, candidate.parameters)))


def _searched(
    problem: OrderingProblem, orders: Orders, stages: nx.DiGraph[int]
) -> Candidate:
    """A schedule that keeps strictly to the orders found."""
    table, most = ranks(problem, orders), caps(problem, orders)
    where = problem.schedule.name
    schedule = replace(
        problem.schedule,
        n=lambda s, b, d: table.get((s, b, d), len(table)),
        in_flight=OwnCaps(most.get),
        name=f"searched, stages {where}",
        in_order=True,
    )
    return Candidate("searched", f"stages {where}", schedule, stages)


def _one_at_a_time(name: str, schedule: Schedule, stages: nx.DiGraph[int]) -> Candidate:
    """The order that holds the least."""
    n = oldest_microbatch_first(len(stages))
    one = OwnCaps(lambda s: 1)
    slow = replace(schedule, n=n, in_flight=one, in_order=False, split_backward=False)
    return Candidate("one microbatch at a time", f"stages {name}", slow, stages)
