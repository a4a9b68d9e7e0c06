"""When a schedule's jobs run, and what its workers hold, from its stages alone."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import networkx as nx
import numpy as np

from ..jobs.job import ELSEWHERE, Direction, Job, Placement, PlanError
from ..jobs.schedule import Schedule
from .activations import peaks
from .event_loop import run_jobs
from .jobs import Jobs, Kind, job_rows, weight_owners
from .joint import fit_joint, flow_order, joint_stages, order_phases
from .network import delays
from .timeline import Timeline
from .updates import StageUpdate, add_updates

MOST = 20_000_000  # jobs, which take some 10 GB
FORWARD, BACKWARD, WEIGHT, UPDATE = Direction


def place_jobs(
    schedule: Schedule,
    kinds: Sequence[Kind],
    preds: Sequence[Sequence[int]],
    joint: Container[int] = (),
) -> Jobs:
    """All jobs, numbered, with w and n asked once for each, and checked.

    kinds, preds: those of one microbatch; see Jobs. joint: the global-batch stages. Of
    theirs, w is asked with microbatch 0, and n with the last for F and 0 for the
    others.
    """
    check_size(schedule, len(kinds))
    alone = frozenset(k for k, (s, _) in enumerate(kinds) if s in joint)
    kind, rows = job_rows(kinds, alone, schedule.microbatches)
    stages = list(map([s for s, _ in kinds].__getitem__, kind))
    directions = list(map([d for _, d in kinds].__getitem__, kind))
    keeper, worker, saved = _placed(schedule, stages, rows, directions)
    forward = [d is FORWARD and s not in joint for s, d in kinds]
    last = list(rows)
    for k in alone:
        last[k] = schedule.microbatches - 1 if kinds[k][1] is FORWARD else 0
    jobs = Jobs(
        tuple(kinds),
        tuple(map(tuple, preds)),
        alone,
        schedule.microbatches,
        schedule.workers,
        kind,
        rows,
        keeper,
        worker,
        _ranked(schedule, stages, last, directions),
        saved={i: where for i, where in saved.items() if forward[kind[i]]},
        gaps=_gaps(schedule, kinds),
    )
    if alone and schedule.in_order:
        blocks = not run_jobs(jobs, [0.0] * len(jobs), in_order=True).complete
        return order_phases(jobs) if blocks else jobs
    return jobs


def _gaps(schedule: Schedule, kinds: Sequence[Kind]) -> tuple[float, ...]:
    """How far jobs of each kind read from their version of weights."""
    if schedule.drift is None:
        return ()
    return tuple(schedule.gap(Job(s, 0, d)) for s, d in kinds)


def check_size(schedule: Schedule, kinds: int) -> None:
    """Raises PlanError for more than fits in memory: for a table of the jobs, or one of
    a microbatch's jobs, of which there are `kinds`, by workers."""
    if max(schedule.microbatches, schedule.workers // 100) * kinds > MOST:
        raise PlanError(
            f"{kinds:,} jobs of each of {schedule.microbatches:,} microbatches on "
            f"{schedule.workers:,} workers are too many to plan or simulate; give fewer"
        )


def _placed(
    schedule: Schedule, *jobs: Sequence[Any]
) -> tuple[list[int], list[int], dict[int, int | str]]:
    """w of all jobs: weight workers, compute workers, and where some save; job by job
    where it is not as it should be, for the error that names the culprit.

    jobs: their stages, microbatches and directions.
    """
    keeper: list[int] = []
    worker: list[int] = []
    saved: dict[int, Any] = {}
    types = set()
    try:
        for i, place in enumerate(map(schedule.w, *jobs)):
            types.add(type(place))
            if len(place) == 2:
                keeps, runs = place
            else:
                keeps, runs, where = place
                if where is not None:
                    saved[i] = where
            keeper.append(keeps)
            worker.append(runs)
        known = set(keeper) | set(worker)
        plain = set(map(type, keeper)) | set(map(type, worker)) <= {int}
        kept = {*saved.values()}.difference(ELSEWHERE)
        plain &= set(map(type, kept)) <= {int}
        inside = all(0 <= each < schedule.workers for each in known | kept)
        fits = plain and inside and types <= {Placement, tuple}
    except Exception:  # the user's own, which schedule.place puts in its job's words
        fits = False
    if fits:
        return keeper, worker, saved
    places = [schedule.place(Job(*job)) for job in zip(*jobs, strict=True)]
    saved = {i: p.saved for i, p in enumerate(places) if p.saved is not None}
    return [p.weights for p in places], [p.compute for p in places], saved


def _ranked(schedule: Schedule, *jobs: Sequence[Any]) -> list[int]:
    """n of all jobs, likewise."""
    priorities: list[Any]
    try:
        priorities = list(map(schedule.n, *jobs))
    except Exception:  # said below, by the job that it is about
        priorities = [None]
    if set(map(type, priorities)) <= {int}:
        return priorities
    return [schedule.priority(Job(*job)) for job in zip(*jobs, strict=True)]


def stage_jobs(schedule: Schedule, stages: nx.DiGraph[int]) -> Jobs:
    """All jobs of a schedule on these stages."""
    back = {s for s, data in stages.nodes(data=True) if data["backward"] != 0}
    flow = flow_order(stages)
    kinds: list[Kind] = [(s, FORWARD) for s in flow]
    for s in filter(back.__contains__, reversed(flow)):
        kinds += [(s, d) for d in schedule.directions[1:]]
    at = {kind: i for i, kind in enumerate(kinds)}
    preds: list[list[int]] = []
    for s, d in kinds:
        if d is FORWARD:
            preds.append([at[p, FORWARD] for p in sorted(stages.predecessors(s))])
        elif d is BACKWARD:
            readers = [at[r, BACKWARD] for r in stages.successors(s) if r in back]
            preds.append([at[s, FORWARD], *readers])
        else:
            preds.append([at[s, BACKWARD]])
    jobs = place_jobs(schedule, kinds, preds, joint_stages(stages))
    if schedule.update_every is None:
        return jobs
    keepers, updates = weight_owners(jobs), []
    for s in sorted(back, reverse=True):
        updater = schedule.updater(s)
        workers = tuple(keepers[s]) if updater is None else (updater,)
        updates.append(StageUpdate(s, workers, (s,), (s,)))
    return add_updates(schedule, jobs, updates)


def kind_seconds(stages: nx.DiGraph[int], kinds: Sequence[Kind]) -> list[float]:
    """How long a job of each kind takes."""
    by_kind, known = [], set(kinds)
    for s, d in kinds:
        data = stages.nodes[s]
        weight = 0.0
        if (s, WEIGHT) in known:
            weight = data.get("weight", data["backward"] / 2)
        seconds = {FORWARD: data["forward"], WEIGHT: weight}
        seconds[UPDATE] = data.get("update", 0.0)
        by_kind.append(seconds.get(d, data["backward"] - weight))
    return by_kind


def most_work(jobs: Jobs, seconds: Sequence[float]) -> float:
    """Seconds of all jobs of the worker that has most to do.

    seconds: of a job of each kind.
    """
    work = [0.0] * jobs.workers
    for kind, worker in zip(jobs.kind, jobs.worker, strict=True):
        if kind < len(seconds):
            work[worker] += seconds[kind]
    return max(work)


def job_seconds(stages: nx.DiGraph[int], jobs: Jobs) -> list[float]:
    """How long each job takes, by number."""
    seconds = kind_seconds(stages, jobs.kinds)
    return [seconds[kind] for kind in jobs.kind]


def run_stages(schedule: Schedule, stages: nx.DiGraph[int]) -> Timeline:
    """The jobs in the order in which they start; not all if in_flight stops them."""
    schedule = fit_joint(schedule, stages)
    jobs = stage_jobs(schedule, stages)
    return run_jobs(
        jobs,
        job_seconds(stages, jobs),
        schedule.cap,
        schedule.release,
        delays(jobs, stages, None),
        schedule.in_order,
    )


def step_seconds(events: Timeline) -> float:
    """Seconds from the start to the end of the last job."""
    return max(events.end, default=0.0)


def likely_seconds(schedule: Schedule, stages: nx.DiGraph[int]) -> float:
    """The mean step over stages that are each up to 4 % slower or faster: one order of
    jobs may be lucky for exactly these times. Infinite if in_flight stops the jobs."""
    steps = []
    for k in range(3):
        other = stages.copy()
        for s, data in other.nodes(data=True):
            for what, i in (("forward", 0), ("backward", 1)):
                data[what] *= 1 + 0.02 * ((7 * s + 3 * k + i) % 5 - 2)
        events = run_stages(schedule, other)
        steps.append(step_seconds(events) if events.complete else float("inf"))
    return sum(steps) / len(steps)


def worker_bytes(
    schedule: Schedule, stages: nx.DiGraph[int], events: Timeline, kept: float = 1.0
) -> list[float]:
    """The most that each worker holds: weights, their gradients, and activations, of
    which the share `kept` is still there between B and W."""
    jobs = events.jobs
    sizes = [stages.nodes[s]["held"] for s, _ in jobs.kinds]
    most = peaks(events, schedule.release, sizes, kept)
    rows = (weight_bytes(jobs, stages), most, _temporary(jobs, stages))
    total = list(map(sum, zip(*rows, strict=True)))
    for (_, s), whole in nx.get_edge_attributes(stages, "whole").items():
        kinds = [jobs.at[s, d] for d in schedule.directions if (s, d) in jobs.at]
        for worker in np.unique(jobs.columns.worker[jobs.grid[:, kinds]]):
            total[worker] += 2 * whole  # and its gradient
    return total


def _temporary(jobs: Jobs, stages: nx.DiGraph[int]) -> list[float]:
    """The most that a job of each worker takes while it runs."""
    most = [0.0] * jobs.workers
    kind, _, worker = jobs.columns
    for k, (stage, _) in enumerate(jobs.kinds[: len(jobs.preds)]):
        size = stages.nodes[stage].get("temporary", 0.0)
        for w in np.unique(worker[kind == k]) if size else ():
            most[w] = max(most[w], size)
    return most


def weight_bytes(jobs: Jobs, stages: nx.DiGraph[int]) -> list[float]:
    """What the weights that each worker keeps take, and their gradients."""
    by_worker = [0.0] * jobs.workers
    for stage, owners in weight_owners(jobs).items():
        for worker in owners:
            by_worker[worker] += stages.nodes[stage]["weights"]
    return by_worker
