"""Looks for the schedule with the shortest simulated step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random
from typing import Any

import networkx as nx
from torch import Tensor
from tqdm import tqdm

from . import show
from .arguments import positive
from .backend import plan
from .candidates import Candidate, Placed, library, moves_weights, placements
from .climb import STARTS, Budget, Climber, climb
from .eventloop import Timeline
from .jobs import Direction, PlanError, Priority, Schedule
from .orders import oldest_microbatch_first
from .pipeline import Plan
from .simulate import Simulation, simulate
from .stage_costs import Costs, counts, of_durations, of_graph
from .tasks import CLOSE, Transfer, make_task, memory

JOBS = 2e6  # run on clocks to look for orders, at an effort of 1
OBJECTIVES = ("latency", "span")
Subject = Mapping[str, Any] | nx.DiGraph | Plan | Callable[..., Any]


def search(
    subject: Subject,
    workers: int | None = None,
    microbatches: int | None = None,
    memory_limit: float | None = None,
    transfer: Transfer = None,
    seed: int = 0,
    *,
    objective: str = "latency",
    stages: int | Sequence[int] | None = None,
    split_backward: bool = True,
    prefetch: int | None = None,
    kept: float = 1.0,
    effort: float = 1.0,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Schedule:
    """The schedule with the shortest step by the simulator: of the library with all
    its parameters, and of orders looked for on its placements.

    subject: times of a stage if the model is cut into one for each worker, as {"F": 1,
        "B": 1, "W": 1}, or lists of them, stage by stage; or stages as
        fxsched/stages.py describes them; or a Plan; or a model, with the arguments of
        a call in `args` and `kwargs`, which is planned for each number of stages.
    workers: how many; those of a Plan unless given.
    microbatches: two for each worker unless given; of a model, at most as many as that
        and a divisor of the batch; of a Plan, its own.
    memory_limit: what a worker may hold at once. With times of stages, activations of a
        stage if there is one for each worker (smaller stages count less); with `held`
        and `weights` of stages, bytes of weights, gradients and activations.
    transfer: as for simulate; None for the `seconds` of the edges between stages.
    seed: of the search; the same gives the same schedule.
    objective: "latency", or "span": the longest time from a worker's first start to
        its last end, where one step follows the other.
    stages: how many to compare; one to four for each worker unless given.
    split_backward: whether to compare schedules whose W are jobs of their own.
    prefetch: as for simulate. Unless given, nothing is known of what it takes to move
        weights and gradients, and schedules that do so are not compared.
    kept: the share of a stage's activations that are still there between B and W. Zero
        Bubble counts 32 h of 34 h + 5 a s.
    effort: how many orders to try, 1 for some ten seconds at most.
    quiet: prints no table and shows no progress.

    Raises PlanError for arguments that aren't as above, and for a limit that no
    schedule meets.
    """
    _check(objective, memory_limit, kept, effort)
    if isinstance(subject, Plan):
        workers = workers or subject.schedule.workers
        microbatches = microbatches or subject.schedule.microbatches
        subject = subject.stages
    if workers is None:
        raise PlanError("search(workers=None): give an int of 1 or more")
    positive("search", workers=workers)
    if microbatches is None:
        microbatches = _microbatches(workers, args, kwargs or {})
    positive("search", microbatches=microbatches)
    jobs = (3 if split_backward else 2) * microbatches
    wanted = counts(stages, workers, jobs)
    call = _Call(subject, tuple(args), dict(kwargs or {}))
    costs = call.costs(workers, microbatches, wanted, split_backward)
    with tqdm(total=1.0, desc="search", disable=quiet, leave=False) as bar:
        found = _Search(
            costs,
            workers,
            microbatches,
            inf if memory_limit is None else memory_limit,
            transfer,
            objective,
            split_backward,
            prefetch,
            kept,
            bar,
        ).run(Random(seed), effort)
    best = found.best()
    if not quiet:
        print(found.table(best))
    return call.checked(best.schedule)
