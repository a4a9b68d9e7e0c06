"""Searches for the schedule with the shortest simulated step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf
from random import Random
from typing import Any

import networkx as nx
from torch import Tensor

from ..clock.network import Transfer, check_transfer
from ..dry_run import Planner
from ..jobs.compared import Planned
from ..jobs.job import PlanError, UnknownModule
from ..jobs.schedule import Schedule
from ..jobs.user_values import flag, is_int, is_number, positive
from ..plans.plan import Plan
from ..progress import Progress
from ..schedules.arguments import one_of
from ..schedules.auto import auto
from .candidate_comparison import Comparison, Goal
from .stage_costs import Costs, counts, of_durations, of_graph

JOBS = 3e6  # run on clocks to look for orders, at an effort of 1
LARGEST = 200_000  # jobs of a schedule
OBJECTIVES = ("latency", "span")


def search(
    subject: Mapping[str, Any] | nx.DiGraph[int] | Plan | Callable[..., Any],
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
    """Searches for the schedule with the shortest simulated step; prints a table.

    Compares the schedules of the library with different parameters, and searches for
    better orders of jobs on their placements.

    For a model, search compares what the planner compares for schedules.auto, each
    schedule with its own cut, and looks for better orders on their placements. It then
    plans the model with the best, and returns the schedule whose plan has the shortest
    step, with its cut. The table shows the steps and bytes of these plans.

    subject: the times of one stage, as {"F": 1, "B": 1, "W": 1}, or lists of times,
        stage by stage, if the model is cut into one stage for each worker; or a graph
        of stages, as described in fxsched/clock/stage_record.py; or a Plan; or a model.
    args, kwargs: the arguments of a call of the model. kwargs may also have options of
        fxsched.plan, such as batch_dims, network, or optimizer, whose state then counts
        as memory.
    workers: the number of workers; by default that of the Plan.
    microbatches: the number of microbatches. By default two for each worker; for a
        model, the largest divisor of its batch up to that; for a Plan, the Plan's own.
    memory_limit: the most that a worker may hold at one time. If `subject` has times:
        the number of microbatches whose activations of a stage it may hold, with one
        stage for each worker (activations of smaller stages count less). If stages have
        `held`, `weights` and `state`: bytes of weights, gradients, optimizer state and
        activations. A model is planned with it: give the backend the same.
    transfer: as for simulate; None for the network of the Plan or of the model's plans
        (network= in kwargs), or else the `seconds` of the edges between stages.
    seed: the seed of the search; equal seeds give equal schedules.
    objective: "latency", or "span": the longest time from a worker's first start to its
        last end, which is the time of a step if steps follow each other.
    stages: the numbers of stages to compare; by default one to four for each worker,
        and for a model any number.
    split_backward: whether to compare schedules with separate W jobs.
    prefetch: as for simulate; by default that of the Plan, or of the model's plans.
        If subject has times, or is a graph, and prefetch is None, search leaves out the
        schedules that send weights or their gradients, since their times aren't known.
    kept: the share of a stage's activations that are held between B and W. For
        transformers, Zero Bubble (Qi et al. 2023, arXiv 2401.10241) gives the share
        32 h / (34 h + 5 a s): hidden size h, a heads, sequence length s.
    effort: how many orders to try; 1 takes seconds, or about 20 s for 10,000 jobs.
    quiet: whether to print no table and show no progress.

    Raises PlanError for wrong arguments, and for a limit that no schedule meets.
    """
    _check(objective, memory_limit, transfer, prefetch, kept, effort)
    _check_rest(seed, split_backward, args, kwargs)
    with Progress("search", quiet) as progress:
        given = dict(kwargs or {})
        if memory_limit is not None:
            given["memory_limit"] = memory_limit
        sought = _Subject(subject, tuple(args), given, progress.at)
        workers, microbatches = sought.size(workers, microbatches)
        jobs = _jobs_of_stage(workers, microbatches, split_backward)
        wanted: Sequence[int | None] = counts(stages, workers, jobs)
        if stages is None and sought.is_model:
            wanted = [None]
        costs = sought.costs(workers, microbatches, wanted, split_backward)
        if transfer is None:
            transfer = costs.network if costs.edges else 0.0
        if costs.unit:  # a plan's stages say how long their weights take
            ahead = sought.kwargs.get("prefetch", 1)
            prefetch = ahead if prefetch is None else prefetch
        limit = inf if memory_limit is None else memory_limit
        rules = (limit, transfer, objective, split_backward, prefetch, kept)
        goal = Goal(workers, costs.microbatches or microbatches, *rules)
        comparison = Comparison(costs, goal, progress.at)
        comparison.run(Random(seed), effort * JOBS)
        comparison.plan()
    best = comparison.best()
    if not quiet:
        print(comparison.table(best))
    return best.candidate.schedule


def _jobs_of_stage(workers: int, microbatches: int, split_backward: bool) -> int:
    """Raises PlanError for more jobs than a search takes."""
    jobs = (2 + split_backward) * microbatches
    if workers * jobs > LARGEST:
        raise PlanError(
            f"search(workers={workers}, microbatches={microbatches}): these make "
            f"{workers * jobs:,} jobs or more, and a search takes {LARGEST:,} at most; "
            "give fewer workers or microbatches"
        )
    return jobs


def _check(
    objective: str,
    memory_limit: float | None,
    transfer: Transfer,
    prefetch: int | None,
    kept: float,
    effort: float,
) -> None:
    one_of("search", "objective", objective, OBJECTIVES)
    if memory_limit is not None and not (is_number(memory_limit) and memory_limit > 0):
        raise PlanError(f"search(memory_limit={memory_limit!r}): give a number above 0")
    check_transfer("search", transfer)
    if prefetch is not None and (
        not is_int(prefetch) or prefetch < 0 or transfer is None
    ):
        raise PlanError(
            f"search(prefetch={prefetch!r}, transfer={transfer!r}): give how many jobs "
            "ahead weights are asked for, and what their transfer takes: a number or a "
            "Link"
        )
    if not is_number(kept) or kept > 1:
        raise PlanError(f"search(kept={kept!r}): give a share, from 0 to 1")
    if not is_number(effort) or effort == 0:
        raise PlanError(f"search(effort={effort!r}): give a number above 0")


def _check_rest(seed: Any, split_backward: Any, args: Any, kwargs: Any) -> None:
    if not is_int(seed):
        raise PlanError(f"search(seed={seed!r}): give an int")
    flag("search", split_backward=split_backward)
    if not isinstance(args, (tuple, list)):
        raise PlanError(
            f"search(args=): give a tuple of the model's arguments, not "
            f"{type(args).__name__}; one is (x,)"
        )
    if not (kwargs is None or isinstance(kwargs, Mapping)):
        raise PlanError(
            f"search(kwargs={kwargs!r}): give a dict of the model's keyword arguments"
        )


@dataclass(frozen=True)
class _Subject:
    """What to find a schedule for, with the arguments of a call if it is a model.

    tell: is told what is done.
    """

    subject: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tell: Callable[[str], object]

    @property
    def is_model(self) -> bool:
        """Whether the subject is to be planned."""
        known = isinstance(self.subject, (type, Schedule, Mapping, nx.DiGraph, Plan))
        return callable(self.subject) and not known

    def size(self, workers: int | None, microbatches: int | None) -> tuple[int, int]:
        """How many workers and microbatches there are to be, checked."""
        if isinstance(self.subject, Plan):
            workers = workers or self.subject.schedule.workers
            its = self.subject.schedule.microbatches
            if microbatches not in (None, its):
                raise PlanError(
                    f"search(microbatches={microbatches!r}): the plan has {its} "
                    "microbatches, and its times are of these; leave microbatches= "
                    "out, or plan again"
                )
            microbatches = its
        if workers is None:
            raise PlanError("search(workers=None): give an int of 1 or more")
        positive("search", workers=workers)
        if microbatches is None:
            most = 2 * workers
            given = (*self.args, *self.kwargs.values())
            tensors = (a for a in given if isinstance(a, Tensor) and a.dim() > 0)
            rows = next((tensor.shape[0] for tensor in tensors), most)
            microbatches = max(m for m in range(1, most + 1) if rows % m == 0)
        positive("search", microbatches=microbatches)
        return workers, microbatches

    def costs(
        self, workers: int, microbatches: int, wanted: Sequence[Any], split: bool
    ) -> Costs:
        """Stages, by how many there are. split: whether B may be."""
        if isinstance(self.subject, Mapping):
            return of_durations(self.subject, workers, wanted)
        if isinstance(self.subject, nx.DiGraph):
            return of_graph(self.subject)
        if isinstance(self.subject, Plan):
            costs = of_graph(self.subject.stages)
            return costs._replace(unit="s", network=self.subject.network)
        if self.is_model:
            return self.plans(workers, microbatches, wanted, split)
        raise PlanError(
            f"search({self.subject!r}): give times of a stage, a networkx.DiGraph of "
            "stages, a Plan, or a model with args="
        )

    def plans(
        self, workers: int, microbatches: int, wanted: Sequence[int | None], split: bool
    ) -> Costs:
        """What the planner compares for schedules.auto, without W and with it."""
        refused: PlanError | None = None
        graphs: dict[int, nx.DiGraph[int]] = {}
        rows, last = list[Planned](), None
        for is_split, count in product((False, True)[: 1 + split], wanted):
            self.tell(f"comparing schedules {'with' if is_split else 'without'} W jobs")
            schedule = replace(auto(workers, microbatches, is_split), stages=count)
            try:
                last = self.plan(schedule)
            except UnknownModule:  # whatever the count
                raise
            except PlanError as error:
                refused = refused or error  # such as more stages than it has parts
                continue
            graphs[len(last.stages)] = last.stages
            if last.compared is not None:
                best = last.compared.best
                best = best._replace(schedule=replace(best.schedule, name="auto"))
                rows += [best, *last.compared.candidates]
        if last is None:
            assert refused is not None
            raise refused
        return Costs(
            graphs,
            bytes=True,
            edges=True,
            unit="s",
            plan=self.plan,
            compared=tuple(rows),
            network=last.network,
            microbatches=last.schedule.microbatches,
        )

    @cached_property
    def plan(self) -> Callable[[Schedule], Plan]:
        """Plans the model, which is traced once."""
        return Planner(self.subject, *self.args, **self.kwargs).plan
