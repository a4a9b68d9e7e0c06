"""Jobs whose order is looked for, with what they take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from ..clock.activations import allocations, lifetimes
from ..clock.jobs import Jobs
from ..clock.memory import state_held
from ..clock.network import Transfer, delays
from ..clock.stage_graph import (
    kind_seconds,
    most_work,
    stage_jobs,
    weight_bytes,
)
from ..jobs.schedule import Schedule


@dataclass(frozen=True)
class OrderingProblem:
    """Jobs with their workers: F, B and W of a stage and microbatch have the same.

    schedule: where w comes from.
    seconds: how long a job of each kind takes.
    delays: how long from one kind's end to another, if on different workers.
    takes, gives: by kind, what a job's start takes of its worker's room for
        activations, and what its end gives back.
    room: of each worker.
    """

    schedule: Schedule
    jobs: Jobs
    seconds: tuple[float, ...]
    delays: dict[tuple[int, int], float]
    takes: tuple[float, ...]
    gives: tuple[float, ...]
    room: tuple[float, ...]

    @cached_property
    def succs(self) -> list[list[tuple[int, float]]]:
        """By job, those that read what it makes, and how long that takes to come from
        another worker."""
        starts, readers = self.jobs.readers
        kind, delays = self.jobs.kind, self.delays
        return [
            [
                (t, delays.get((kind[j], kind[t]), 0.0))
                for t in readers[starts[j] : starts[j + 1]]
            ]
            for j in range(len(self.jobs))
        ]

    @cached_property
    def preds(self) -> list[list[tuple[int, float]]]:
        """The same from a reader to what it reads."""
        preds: list[list[tuple[int, float]]] = [[] for _ in range(len(self.jobs))]
        for j, after in enumerate(self.succs):
            for t, delay in after:
                preds[t].append((j, delay))
        return preds

    @cached_property
    def looped(self) -> bool:
        """Whether a worker has several stages."""
        stages = [self.jobs.kinds[kind][0] for kind in self.jobs.kind]
        pairs = set(zip(self.jobs.worker, stages, strict=True))
        return len(pairs) > len({worker for worker, _ in pairs})

    @cached_property
    def work(self) -> float:
        """Of the worker that has most to do, which no order is shorter than."""
        return most_work(self.jobs, self.seconds)


def make_problem(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    transfer: Transfer,
    kept: float,
    limit: float,
) -> OrderingProblem | None:
    """The jobs of a schedule; None if F, B and W of a stage are on different workers,
    or the weights and the optimizer's state alone are above the limit.

    kept: the share of what F saves that is still there between B and W.
    """
    jobs = stage_jobs(schedule, stages)
    worker = jobs.columns.worker[jobs.grid]
    for life in lifetimes(jobs, schedule.release):
        if (worker[:, life[1:]] != worker[:, [life.forward]]).any():
            return None
    sizes = [stages.nodes[s]["held"] for s, _ in jobs.kinds]
    takes, gives = map(tuple, allocations(jobs, schedule.release, sizes, kept))
    states = state_held(schedule, stages, jobs)
    pairs = zip(weight_bytes(jobs, stages), states, strict=True)
    left = tuple(limit - weights - state for weights, state in pairs)
    if min(left) < 0:
        return None
    seconds = tuple(kind_seconds(stages, jobs.kinds))
    between = delays(jobs, stages, transfer)
    return OrderingProblem(schedule, jobs, seconds, between, takes, gives, left)
