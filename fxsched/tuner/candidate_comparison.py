"""Schedules against each other on the simulator's clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

import networkx as nx

from ..accounts.paper import held_memory
from ..clock.network import Transfer
from ..draw import tables
from ..draw.palette import Clock, clock
from ..draw.whole_stages import meet_notes, stage_count
from ..jobs.job import PlanError
from ..jobs.own_caps import OwnCaps
from ..jobs.schedule import Schedule
from ..plans.plan import Plan
from ..schedules.orders import oldest_microbatch_first
from ..simulator.simulate import Simulation, simulate
from .candidates import Candidate, library, moves_weights, placements
from .evaluate_order import CLOSE, Orders, caps, ranks
from .local_search import Budget, Climber, climb
from .ordering_problem import OrderingProblem, make_problem
from .stage_costs import Costs

ALIKE = 1e-3  # share of a step that no prediction tells apart
FINALISTS = 3  # placements whose best order is compared
PLANNED = 5  # schedules that are planned for a model
LONGER = "longer by estimates, and not planned"
MOVING = "not compared, since they move weights or gradients and prefetch isn't given"


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

    tell: is told what is done, and how much of it.
    longer: schedules of longer steps by estimates, which were not planned.
    """

    costs: Costs
    goal: Goal
    tell: Callable[[str], object] = lambda text: None
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    longer: list[str] = field(default_factory=list)

    def run(self, random: Random, jobs: float) -> None:
        """jobs: how many to run on clocks in looking for orders."""
        candidates = self._library()
        for number, candidate in enumerate(candidates, 1):
            self.tell(f"simulating {number} of {len(candidates)} schedules")
            self.enter(candidate)
        looking = "looking for orders of jobs, {:.0%}".format
        budget = Budget(jobs, lambda left: self.tell(looking(min(1 - left / jobs, 1))))
        climbers = []
        graphs = {} if self.costs.compared else self.costs.graphs  # which have cuts
        places = placements(
            candidates, graphs, self.goal.workers, self.goal.microbatches
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

    def plan(self) -> None:
        """Plans PLANNED of the best for the model, if there is one, auto's first; puts
        these plans in the place of estimates."""
        make, estimated = self.costs.plan, self._sorted()
        if make is None:
            return
        estimated.sort(key=lambda row: row.candidate.name != "auto")
        self.longer = [row.candidate.name for row in estimated[PLANNED:]]
        self.rows = []
        for number, row in enumerate(estimated[:PLANNED], 1):
            self.tell(f"planning {number} of {PLANNED} candidates")
            candidate = row.candidate
            try:
                plan = _planned(make, candidate.made)
            except PlanError:
                continue  # such as a cap that a global-batch stage can't keep
            strict = plan.schedule.in_order
            found = replace(candidate.made, in_order=strict)
            simulation = plan.simulate(transfer=self.goal.transfer)
            most = max(peaks.at_once.total for peaks in plan.memory)
            chosen = candidate._replace(schedule=found, stages=plan.stages)
            self.rows.append(Row(chosen, simulation, most))

    def _library(self) -> list[Candidate]:
        if self.costs.compared:
            return [
                Candidate(
                    each.schedule.name or "",
                    "",
                    each.schedule,
                    each.stages,
                    each.schedule,
                )
                for each in self.costs.compared
            ]
        moves = self.goal.prefetch is not None
        candidates, out = [], dict[str, None]()
        for each in library(
            self.goal.workers, self.goal.microbatches, self.costs.graphs, moves
        ):
            if each.schedule.split_backward and not self.goal.split_backward:
                continue
            moved = moves_weights(each.schedule, each.stages)
            if moved and not moves:
                out[each.name] = None
            else:
                candidates.append(each)
        self.left_out = list(out)
        return candidates

    @property
    def _transfer(self) -> Transfer:
        """What messages take; None for the estimates that edges have."""
        return None if self.costs.compared else self.goal.transfer

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
            cut=schedule.cut,
        )
        return make_problem(
            bare, stages, self._transfer, self.goal.kept, self.goal.limit
        )

    def enter(self, candidate: Candidate) -> None:
        """Simulates a schedule, and compares it if it comes to an end."""
        schedule, stages = candidate.schedule, candidate.stages
        try:
            simulation = simulate(
                schedule, stages, None, self._transfer, self.goal.prefetch
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
        """The shortest within the limit; of those that are as short but for a
        thousandth, the one that holds the least, and of these the first.

        Raises PlanError if there is none.
        """
        within = [row for row in self.rows if self.fits(row)]
        if within:
            least = min(map(self.length, within)) * (1 + ALIKE)
            short = [row for row in within if self.length(row) <= least]
            return min(short, key=lambda row: row.memory)
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
        time = clock(best.simulation.latency, self.costs.unit)
        cells = [self._cells(row, best, time) for row in self._sorted()]
        memory = "memory" if self.costs.bytes else "activations"
        step, span = (f"{name} {time.unit}".strip() for name in ("step", "span"))
        headers = f"schedule|stages|{step}|{span}|bubble|{memory}|note"
        width = tables.columns()
        parts = [line, tables.table(headers, cells, "lrrrrrl", width, wrap=True)]
        parts += meet_notes(cells, width)
        shown = {row.candidate.name for row in self.rows}
        out = {
            LONGER: [name for name in self.longer if name not in shown],
            MOVING: self.left_out,
        }
        for said, names in out.items():
            text = f"{said}: {', '.join(dict.fromkeys(names))}"
            parts += [tables.wrapped([text])] * bool(names)
        return "\n\n".join(parts)

    def _sorted(self) -> list[Row]:
        """Those within the limit first, and the shortest first."""
        return sorted(self.rows, key=lambda r: (not self.fits(r), self.length(r)))

    def _cells(self, row: Row, best: Row, time: Clock) -> tuple[str, ...]:
        """A row of the table; the span and its bubble only if that is made short."""
        step, latency = row.simulation, self.goal.objective == "latency"
        bubble = step.bubble_rate if latency else step.span_bubble_rate
        write = tables.byte_text if self.costs.bytes else "{:.4g}".format
        return (
            _title(row.candidate),
            stage_count(row.simulation.stages),
            time.cell(step.latency),
            "" if latency else time.cell(step.span),
            f"{100 * bubble:.1f} %",
            write(row.memory),
            "best" if row is best else "" if self.fits(row) else "over the limit",
        )


def _planned(make: Callable[[Schedule], Plan], schedule: Schedule) -> Plan:
    """The plan; with n as mere priorities where the model is cut otherwise for it than
    it was for the search, and strict orders stop it."""
    try:
        return make(schedule)
    except PlanError:
        if not schedule.in_order:
            raise
        return make(replace(schedule, in_order=False))


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
    return Candidate("searched", f"stages {where}", schedule, stages, schedule)


def _one_at_a_time(name: str, schedule: Schedule, stages: nx.DiGraph[int]) -> Candidate:
    """The order that holds the least."""
    n = oldest_microbatch_first(len(stages))
    one = OwnCaps(lambda s: 1)
    slow = replace(schedule, n=n, in_flight=one, in_order=False, split_backward=False)
    title = "one microbatch at a time", f"stages {name}"
    return Candidate(*title, slow, stages, slow)
