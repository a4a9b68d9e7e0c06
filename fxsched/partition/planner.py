"""Chooses how many stages to cut a model into, and numbers them, for a schedule.

The cut with the least predicted step time by formula is found for each number of stages
that the schedule leaves open; simulating the schedule on them decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import networkx as nx

from ..accounts.paper import held_memory, paper_step
from ..accounts.times import step_times
from ..clock.activations import most_in_flight
from ..clock.jobs import weights_stay
from ..clock.joint import fit_joint
from ..clock.memory import Memory
from ..clock.stage_graph import (
    job_seconds,
    kind_seconds,
    likely_seconds,
    most_work,
    run_stages,
    stage_jobs,
    step_seconds,
)
from ..clock.timeline import Timeline
from ..jobs.job import Direction, Job, PlanError
from ..jobs.schedule import Schedule
from .cut_cost import Cut, Problem, never
from .partitioner import best_cut, improve

# A schedule that leaves the number of stages open gets up to so many a worker; a few
# workers may have more, up to so many in all.
LOOPS, LOOPED = 2, 8
# As many where w does not look at the stage: the gradients of one are summed while the
# next runs, and weights that are kept elsewhere come stage by stage.
FLAT = 8
# But messages of a sum around a ring of workers are to have so many bytes: each takes
# time from the cores of all.
PIECE = 1 << 20
# Jobs to simulate while units are moved between stages.
SIMULATED = 5_000
# So many of the best cuts with several stages a worker are improved.
IMPROVED = 2
# Moving units may give the busiest worker more work by this factor: at few microbatches
# a heavy first stage fills the pipeline, but the longer the step the more it costs.
LOPSIDED = 1.1
# What must be saved of a step: by moving units, by more stages a worker, and by giving
# workers several stages at all. Each stage costs messages and copies that take time
# from the cores, which simulating doesn't know of.
WORTH, STAGE_WORTH, LOOP_WORTH = 0.02, 0.06, 0.07


class MemoryLimitError(PlanError):
    """No cut keeps all workers within the memory limit.

    least: the fewest bytes that were found.
    """

    def __init__(self, text: str, least: float) -> None:
        super().__init__(text)
        self.least = least


class Choice(NamedTuple):
    """A cut, its schedule, and what simulating them gave."""

    cut: Cut
    schedule: Schedule
    seconds: float
    memory: Memory  # of the worker that holds the most

    @property
    def bytes(self) -> float:
        """Of that worker."""
        return self.memory.total

    @property
    def stages(self) -> int:
        """How many stages the cut has."""
        return max(self.cut, default=0) + 1


def choose_cut(
    problem: Problem, schedule: Schedule, memory_limit: float | None = None
) -> Choice:
    """The cut whose step the schedule should take the shortest, of those within
    `memory_limit` bytes a worker.

    problem: its rounds, limit and in_flight are left to this function.
    Raises PlanError for more stages than units, and for a limit that no cut meets.
    """
    return _Planner(problem, schedule, memory_limit).run()


def stage_counts(problem: Problem, schedule: Schedule) -> list[int]:
    """The numbers of stages that choose_cut tries where the schedule says none."""
    return _Planner(problem, schedule, None)._counts(len(problem.units))


def predict(
    problem: Problem, schedule: Schedule, memory_limit: float | None = None
) -> Choice:
    """What simulating gives where each unit is a stage."""
    cut = tuple(range(len(problem.units)))
    return _Planner(problem, schedule, memory_limit)._choice(cut)


def moved_seconds(schedule: Schedule, stages: nx.DiGraph[int]) -> float:
    """Of a step in which weights and gradients that go to other workers take time.
    Infinite if in_flight stops the jobs."""
    schedule = fit_joint(schedule, stages)
    events = run_stages(schedule, stages)
    if not events.complete:
        return float("inf")
    jobs = events.jobs
    if weights_stay(jobs):
        return step_seconds(events)
    step = paper_step(schedule, stages, events)
    return step_times(step, stages, job_seconds(stages, jobs), None, True).end


def most_held(schedule: Schedule, stages: nx.DiGraph[int]) -> float:
    """Bytes of the worker that holds the most, in a step on paper."""
    schedule = fit_joint(schedule, stages)
    held = held_memory(schedule, stages, run_stages(schedule, stages))
    return max(memory.total for memory in held)


def fastest(choices: Sequence[Choice], memory_limit: float | None) -> Choice:
    """The choice with the shortest step, of those within `memory_limit` bytes a worker.

    Raises MemoryLimitError if there is none.
    """
    if memory_limit is not None:
        within = [each for each in choices if each.bytes <= memory_limit]
        if not within:
            least = min(each.bytes for each in choices)
            raise MemoryLimitError(
                f"memory_limit={memory_limit:.0f}: however stages are cut into shards, "
                f"a worker holds {least:.0f} bytes or more; raise the limit, use more "
                "workers, stages or shards, smaller microbatches, or in_flight",
                least,
            )
        choices = within
    return min(choices, key=lambda each: each.seconds)


@dataclass(frozen=True)
class _Planner:
    problem: Problem
    schedule: Schedule
    limit: float | None

    def run(self) -> Choice:
        most = len(self.problem.units)
        wanted = self.schedule.stages
        if wanted is not None and wanted > most:
            raise PlanError(
                f"the schedule wants {wanted} stages, but the model can be cut into "
                f"{most} at most; give a schedule of that many stages or fewer (many "
                "have one for each worker)"
            )
        counts = [wanted] if wanted else self._counts(most)
        choices = [choice for count in counts for choice in self._cuts(count)]
        if not choices:
            raise PlanError(
                f"no cut into {counts[-1]} stages separates the model at each "
                "stage_boundary; give the schedule more stages, or leave out a "
                "stage_boundary"
            )
        within = [c for c in choices if self.limit is None or c.bytes <= self.limit]
        if not within:
            raise self._too_large(choices)
        within.sort(key=lambda c: c.seconds)
        single = [c for c in within if c.stages <= self.schedule.workers]
        best = [c for c in within if c not in single]
        best = [self._improved(c) for c in [*single[:1], *best[:IMPROVED]]]
        least = min(c.seconds for c in best)
        if single and best[0].seconds <= least * (1 + LOOP_WORTH):
            return best[0]
        close = [c for c in best if c.seconds <= least * (1 + STAGE_WORTH)]
        return min(close, key=lambda c: (c.stages, c.seconds))

    def _counts(self, most: int) -> list[int]:
        """Multiples of the workers, as far as w and n know so many stages. Where each
        microbatch is computed on one worker: the least of these from FLAT on; or FLAT
        or fewer, if weights aren't placed by stage either."""
        workers = self.schedule.workers
        if not self.schedule.is_open:
            every = range(self.schedule.microbatches)
            places = [
                [self.schedule.place(Job(s, b, Direction.FORWARD)) for b in every]
                for s in range(workers)
            ]
            computes = {tuple(each.compute for each in stage) for stage in places}
            if len(computes) == 1:
                one, several = min(workers, most), workers * -(-FLAT // workers)
                if all(stage == places[0] for stage in places):
                    several = self._buckets
                several = min(several, most) if workers > 1 else one
                return [max(several if self._knows(several) else one, 1)]
        largest = min(max(LOOPS * workers, LOOPED), most)
        loops = list(range(workers, largest + 1, workers)) or [max(most, 1)]
        return [count for count in loops if count == loops[0] or self._knows(count)]

    @property
    def _buckets(self) -> int:
        """In how many stages gradients are added up that all workers want."""
        if not self.problem.in_ring:
            return FLAT
        size = sum(unit.gradients for unit in self.problem.units)
        return max(2, min(FLAT, int(size / self.schedule.workers / PIECE)))

    def _knows(self, count: int) -> bool:
        """Whether w and n, which may be tables, have entries for so many stages."""
        if self.schedule.is_open:
            return True
        every = range(min(2, self.schedule.microbatches))
        jobs = [Job(count - 1, b, d) for b in every for d in self.schedule.directions]
        try:
            for job in jobs:
                self.schedule.place(job)
                self.schedule.priority(job)
        except PlanError as error:
            if isinstance(error.__cause__, LookupError):
                return False
            raise
        return True

    def _cuts(self, count: int) -> list[Choice]:
        """Cuts into so many stages: of equal work, or with short paths where stages
        share workers; and smaller stages where a worker would hold too much."""
        choices: list[Choice] = []
        if not self.problem.units:
            return [self._choice(())]
        problem = replace(self.problem, rounds=self._rounds(count))
        if self.limit is None:  # nor does it matter what B computes again
            problem = replace(problem, recomputes=never)
        else:
            held = (most_in_flight(self.schedule, s) for s in range(count))
            problem = replace(problem, in_flight=tuple(held))
        floors = [0.0]
        workers = self.schedule.workers
        if self.schedule.is_open and workers < count <= 2 * workers:
            floors.append(self.problem.seconds / workers)
        for floor in floors:
            for limit in self._limits():
                cut = best_cut(replace(problem, floor=floor, limit=limit), count)
                if cut is None:
                    break
                choices.append(self._choice(number(problem, cut)))
                if self.limit is None or choices[-1].bytes <= self.limit:
                    break
        return choices

    def _limits(self) -> list[float | None]:
        """Limits of a stage to try: the worker's own, then less and less, since a
        worker may have several."""
        if self.limit is None:
            return [None]
        return [None, *(self.limit * share for share in (1, 0.7, 0.5, 0.35, 0.25))]

    def _rounds(self, count: int) -> float:
        """F jobs of the worker that has most of them, less one."""
        if self.schedule.is_open:
            jobs = self.schedule.microbatches * count / self.schedule.workers
            return max(jobs, self.schedule.microbatches) - 1
        placed = [
            self.schedule.place(Job(s, b, Direction.FORWARD)).compute
            for s in range(count)
            for b in range(self.schedule.microbatches)
        ]
        return max(Counter(placed).values()) - 1

    def _choice(self, cut: Cut) -> Choice:
        stages = stage_graph(self.problem, cut)
        schedule = fit_joint(self.schedule.fitted(stages), stages)
        events = run_stages(schedule, stages)
        seconds = likely_seconds(schedule, stages)
        return Choice(cut, schedule, seconds, self._most(schedule, stages, events))

    def _most(
        self, schedule: Schedule, stages: nx.DiGraph[int], events: Timeline
    ) -> Memory:
        """What the worker that holds the most holds, where that matters."""
        if self.limit is None:
            return Memory()
        return max(
            held_memory(schedule, stages, events), key=lambda memory: memory.total
        )

    def _improved(self, choice: Choice) -> Choice:
        """The choice after moving units, if simulation says it's worth it."""
        stages, fixed = stage_graph(self.problem, choice.cut), choice.schedule
        jobs = stage_jobs(fixed, stages)
        most_seconds = LOPSIDED * most_work(jobs, kind_seconds(stages, jobs.kinds))

        def seconds(cut: Cut) -> float:
            stages = stage_graph(self.problem, cut)
            if any(a > b for a, b in stages.edges):  # would change the numbers
                return float("inf")
            if most_work(jobs, kind_seconds(stages, jobs.kinds)) > most_seconds:
                return float("inf")
            events = run_stages(fixed, stages)
            most = self._most(fixed, stages, events).total
            return float("inf") if most > (self.limit or 0.0) else step_seconds(events)

        cut = improve(self.problem, choice.cut, seconds, SIMULATED // len(jobs))
        again = replace(self, schedule=fixed) if self.schedule.is_open else self
        better = again._choice(cut)
        return better if better.seconds < choice.seconds * (1 - WORTH) else choice

    def _too_large(self, choices: Sequence[Choice]) -> PlanError:
        best = min(choices, key=lambda c: c.bytes)
        while True:  # below what the limit allows, how low does it go?
            lower = replace(self, limit=best.bytes * 0.95)
            better = [c for c in lower._cuts(best.stages) if c.bytes < best.bytes]
            if not better:
                break
            best = min(better, key=lambda c: c.bytes)
        return MemoryLimitError(
            f"memory_limit={self.limit:.0f}: no cut keeps every worker within it; the "
            f"best found holds {best.bytes:.0f} bytes, in {best.stages} stages"
            f"{_kinds(best)}; raise the limit, use more workers or stages, smaller "
            "microbatches, or in_flight",
            best.bytes,
        )


def _kinds(choice: Choice) -> str:
    """What takes how many bytes, where kinds are counted apart."""
    if choice.schedule.update_every is None:
        return ""
    kinds = choice.memory._asdict().items()
    sizes = ", ".join(f"{kind} {size:.0f}" for kind, size in kinds if size)
    return f" ({sizes})"


def number(problem: Problem, cut: Cut) -> Cut:
    """The same stages, numbered by their distance from the inputs, so that parallel
    branches take turns and w's like s mod W put them on different workers."""
    stages = stage_graph(problem, cut)
    level: dict[int, int] = {}
    for stage in nx.topological_sort(stages):
        level[stage] = max(
            (level[p] + 1 for p in stages.predecessors(stage)), default=0
        )
    first = {stage: cut.index(stage) for stage in stages}
    order = sorted(stages, key=lambda s: (level[s], first[s]))
    new = {stage: i for i, stage in enumerate(order)}
    return tuple(new[stage] for stage in cut)


def stage_graph(problem: Problem, cut: Cut) -> nx.DiGraph[int]:
    """The stages of a cut as clock.stage_graph wants them."""
    stages: nx.DiGraph[int] = nx.DiGraph()
    members: list[list[int]] = [[] for _ in range(max(cut, default=-1) + 1)]
    for unit, stage in enumerate(cut):
        members[stage].append(unit)
    for stage, inside in enumerate(members):
        stages.add_node(stage, **problem.stage(inside, stage)._asdict())
    for transfer in problem.edges:
        maker = cut[transfer.maker]
        for reader in sorted({cut[r] for r in transfer.readers} - {maker}):
            edge: dict[str, float] = stages.get_edge_data(maker, reader, {})
            seconds = max(edge.get("seconds", 0.0), transfer.there)
            stages.add_edge(maker, reader, seconds=seconds)
    return stages
