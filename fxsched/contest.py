"""Schedules against each other on the simulator's clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import isfinite
from random import Random
from typing import NamedTuple

import networkx as nx

from . import show
from .candidates import Candidate, library, moves_weights, placements
from .climb import STARTS, Budget, Climber, climb
from .eventloop import Timeline
from .jobs import Direction, PlanError, Schedule
from .simulate import Simulation, simulate
from .stage_costs import Costs
from .tasks import CLOSE, Orders, Task, Transfer, make_task, memory, replay

FINALISTS = 3  # placements whose best order is shown


class Row(NamedTuple):
    """A schedule and what its step takes; memory: of the worker that holds most."""

    candidate: Candidate
    simulation: Simulation
    memory: float


@dataclass
class Contest:
    """Compares the library, then looks for orders on its placements.

    limit: of memory, maybe infinite. The rest is as fxsched.search has it.
    """

    costs: Costs
    workers: int
    microbatches: int
    limit: float
    transfer: Transfer
    objective: str
    split_backward: bool
    prefetch: int | None
    kept: float
    tell: Callable[[float], object] = lambda share: None  # of how far it is
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def run(self, random: Random, jobs: float) -> None:
        """jobs: to run on clocks in looking for orders."""
        candidates = self._library()
        for candidate in candidates:
            self._enter(candidate)
            self.tell(0.5 / len(candidates))
        budget = Budget(jobs, lambda spent: self.tell(0.5 * spent / jobs))
        graphs, size = self.costs.graphs, (self.workers, self.microbatches)
        climbers = []
        for name, schedule, stages in placements(candidates, graphs, *size):
            task = self._task(schedule, stages)
            if task is not None:
                climbers.append(Climber(task, name, self.objective, budget))
        climb(climbers, random, budget)
        found = sorted(climbers, key=lambda c: c.best)[:FINALISTS]
        for climber in found:
            if climber.orders is not None:
                self._enter(self._searched(climber, climber.orders))

    def _library(self) -> list[Candidate]:
        moves = self.prefetch is not None
        found = []
        for each in library(self.workers, self.microbatches, self.costs.graphs, moves):
            if each.schedule.split_backward and not self.split_backward:
                continue
            if not moves and moves_weights(each.schedule, each.stages):
                self.left_out.append(each.name)
            else:
                found.append(each)
        return found

    def _enter(self, candidate: Candidate) -> None:
        try:
            simulation = simulate(
                candidate.schedule,
                candidate.stages,
                None,
                self.transfer if self._network else 0.0,
                self.prefetch,
            )
        except PlanError:
            return  # such as a cap that stops it here
        held = memory(
            candidate.schedule, simulation.stages, simulation.timeline, self.kept
        )
        self.rows.append(Row(candidate, simulation, max(held)))
