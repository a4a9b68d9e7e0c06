"""What each worker does and holds in a simulated step, counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np

from ..jobs.job import Piece
from ..jobs.schedule import Schedule
from .activations import peaks
from .jobs import Jobs
from .stage_graph import is_whole
from .timeline import Timeline
from .weight_fetches import fetches
from .weight_traffic import count_traffic, stage_keepers, weight_size


@dataclass(frozen=True)
class Worker:
    """What one worker did in a simulated step.

    busy: time in jobs.
    peak_activations: the most microbatches of stages between F and B (W, if the
        backward is split), counted from the start of F at the worker of B.
    peak_bytes: the most bytes of activations, where the stages say what F saves.
    weights_held: stages whose weights are kept here.
    weight_fetches: weights brought here from elsewhere; they stay while the worker's
        next job reads them too, as the runtime does it.
    weight_transmissions: jobs run here whose weights are kept elsewhere; what
        parallelsim counts, which fetches for every job.
    activations_received, activations_sent: what jobs made for jobs on another worker,
        one for each job and worker: outputs of F, gradients of B, what F saved for B.
    gradients_returned: sums of weight gradients sent to the worker that adds them up.
    updates: steps of the optimizer that it takes, one for each stage.
    weights_renewed: weights kept here that come new from the worker that u names, or
        from the one that averages replicas.
    parameter_bytes: bytes of weights and of their gradients that come here, where the
        stages say what they take.
    """

    busy: float
    peak_activations: int
    peak_bytes: float | None
    weights_held: int
    weight_fetches: int
    weight_transmissions: int
    activations_received: int
    activations_sent: int
    gradients_returned: int
    updates: int
    weights_renewed: int
    parameter_bytes: int | None


def worker_records(
    schedule: Schedule, stages: nx.DiGraph[int], timeline: Timeline
) -> tuple[Worker, ...]:
    """What each worker did and held in a step."""
    jobs, count = timeline.jobs, schedule.workers
    compute = jobs.columns.worker
    order = np.asarray(timeline.order, int)
    times = np.asarray(timeline.end) - np.asarray(timeline.start)
    busy = np.bincount(compute[order], times, count)
    first = _first_pieces(jobs)
    ones = peaks(timeline, schedule.release, [float(s in first) for s, _ in jobs.kinds])
    sizes: list[float] | list[None] = [None] * count
    if all("held" in data for _, data in stages.nodes(data=True)):
        saved = [stages.nodes[s]["held"] for s, _ in jobs.kinds]
        sizes = peaks(timeline, schedule.release, saved)
    numbers, away, fetched, _ = fetches(schedule, stages, timeline)
    here = compute[numbers]
    keepers = stage_keepers(schedule, jobs)
    owners = [w for s, each in keepers.items() if s in first for w in each.owners]
    held = np.bincount(owners, None, count)
    received, sent = _messages(jobs, stages)
    traffic = count_traffic(schedule, stages, jobs, keepers)
    parameters: list[int] | list[None] = [None] * count
    if all("weights" in data for _, data in stages.nodes(data=True)):
        sizes_of = np.array([weight_size(stages, s) for s, _ in jobs.kinds])
        brought = (fetched > 0) * sizes_of[jobs.columns.kind[numbers]]
        came = np.bincount(here, brought, count) + np.array(traffic.received)
        parameters = came.astype(int).tolist()
    columns = (
        busy.tolist(),
        map(int, ones),
        sizes,
        held.tolist(),
        np.bincount(here, fetched, count).astype(int).tolist(),
        np.bincount(here[away], None, count).tolist(),
        received.tolist(),
        sent.tolist(),
        traffic.returned,
        np.bincount(compute[jobs.regular :], None, count).tolist(),
        traffic.renewed,
        parameters,
    )
    return tuple(Worker(*row) for row in zip(*columns, strict=True))


def _first_pieces(jobs: Jobs) -> set[int]:
    """The stages; of those that are pieces of a shard, the first that it has."""
    first: dict[object, int] = {}
    for s in sorted({s for s, _ in jobs.kinds}):
        first.setdefault((s.stage, s.shard) if isinstance(s, Piece) else s, s)
    return set(first.values())


def _messages(jobs: Jobs, stages: nx.DiGraph[int]) -> tuple[Any, Any]:
    """How many messages between jobs each worker receives and sends: one for each job
    and other worker that reads what it made."""
    count, worker = jobs.workers, jobs.columns.worker
    received, sent = np.zeros(count, int), np.zeros(count, int)
    for p, reading, last in _readings(jobs, stages):
        source = worker[jobs.grid[:last, p]]
        to = np.sort(worker[jobs.grid[:last, reading]], 1)
        new = to != source[:, None]
        new[:, 1:] &= to[:, 1:] != to[:, :-1]
        received += np.bincount(to[new], None, count)
        sent += np.bincount(source, new.sum(1), count).astype(int)
    for p, k in _whole(jobs, stages):
        joint, other = (worker[p], k) if p in jobs.joint else (worker[k], p)
        others = np.setdiff1d(worker[jobs.grid[:, other]], joint)
        one, all_of_them = (sent, received) if p in jobs.joint else (received, sent)
        one[joint] += len(others)
        all_of_them[others] += 1
    return received, sent


def _whole(jobs: Jobs, stages: nx.DiGraph[int]) -> list[tuple[int, int]]:
    """Kinds of jobs, one before the other: a joint one, whose result all of the others
    read as it is, or to which they give its gradient."""
    return [
        (p, k)
        for k, before in enumerate(jobs.preds)
        for p in before
        if (p in jobs.joint) != (k in jobs.joint)
        if is_whole(stages, jobs, p, k)
    ]


def _readings(
    jobs: Jobs, stages: nx.DiGraph[int]
) -> Iterator[tuple[int, list[int], int]]:
    """Each kind with the kinds that read the same of it, and for how many microbatches:
    what joint jobs read of joint ones is sent once, all else once for each. Those that
    read it whole are not among them."""
    width, apart = len(jobs.preds), set(_whole(jobs, stages))
    readers: list[tuple[list[int], list[int]]] = [([], []) for _ in range(width)]
    for k, before in enumerate(jobs.preds):
        for p in before:
            if (p, k) not in apart:
                readers[p][jobs.joint.issuperset((p, k))].append(k)
    for p, (parts, whole) in enumerate(readers):
        if parts:
            yield p, parts, jobs.microbatches
        if whole:
            yield p, whole, 1
