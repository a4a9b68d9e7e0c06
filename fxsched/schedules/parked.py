"""Has what F of any schedule saves wait for B elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import networkx as nx

from ..jobs.job import ELSEWHERE, Direction, Placement, PlanError
from ..jobs.per_shard import for_shard
from ..jobs.schedule import Schedule
from ..jobs.user_values import is_int
from .arguments import constructor

Where = int | str | None


@constructor
def parked(
    schedule: Schedule, where: Where | Callable[[int, int], Where] = "disk"
) -> Schedule:
    """Makes any schedule keep its activations elsewhere between F and B.

    w(s, b, F).saved = where(s, b). All other settings are those of the schedule. What B
    (or W) reads of F comes back `prefetch` jobs before it.

    where: "disk" (a file of the run, in the folder TMPDIR), "host" (pinned memory, for
        a model on a device), a worker, or a function where(s, b) that returns one of
        these, or None for the worker that runs B. vDNN (Rhu et al. 2016, arXiv
        1602.08124); BPipe (Kim et al. 2023, PMLR 202) parks activations of the first
        workers of 1F1B on the last.
    Raises PlanError if `schedule` isn't a schedule, or for another `where`.
    """
    if not isinstance(schedule, Schedule):
        raise PlanError(f"parked(schedule={schedule!r}): give a Schedule")
    if not callable(where) and not is_int(where) and where not in ELSEWHERE:
        raise PlanError(
            f"parked(where={where!r}): give 'disk', 'host', a worker, or a function of "
            "(stage, microbatch)"
        )
    fit = schedule.fit

    def w(s: int, b: int, d: Direction, p: int = 0) -> Placement:
        place = Placement(*for_shard(schedule.w, p)(s, b, d))
        if d is not Direction.FORWARD:
            return place
        return place._replace(saved=where(s, b) if callable(where) else where)

    def fit_parked(stages: nx.DiGraph[int]) -> Schedule:
        return parked(schedule.fitted(stages), where)

    return replace(
        schedule,
        w=schedule.w if schedule.is_open else w,
        fit=fit and fit_parked,
        candidates=(),
        name=f"{schedule.name or 'schedule'}, parked",
    )


def moved(place: Placement, worker: Callable[[int], int]) -> Placement:
    """A placement on other workers. worker: the new number of each."""
    saved = place.saved
    if saved is not None and not isinstance(saved, str):
        saved = worker(saved)
    return Placement(worker(place.weights), worker(place.compute), saved)
