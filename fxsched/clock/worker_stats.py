"""What each worker does and holds in a simulated step, counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np

from ..jobs import Direction, Schedule
from .activations import peaks
from .timeline import Jobs, Timeline

FORWARD, BACKWARD, WEIGHT = Direction


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


def owners(jobs: Jobs) -> dict[int, list[int]]:
    """The workers that keep the weights of each stage."""
    found: dict[int, list[int]] = {}
    width = len(jobs.kinds)
    for stage in sorted({s for s, _ in jobs.kinds}):
        kinds = [k for k, (s, _) in enumerate(jobs.kinds) if s == stage]
        found[stage] = sorted({w for k in kinds for w in jobs.weights[k::width]})
    return found


def sum_root(owners: Sequence[int], number: int) -> int:
    """The owner that adds up gradients: of its stages or groups, each in turn."""
    return owners[number % len(owners)]


def fetches(stages: nx.DiGraph[int], timeline: Timeline) -> tuple[Any, Any, Any, Any]:
    """The jobs of worker 0 in their order, then those of worker 1 and so on; whether
    each reads weights kept elsewhere; how many groups of them it has to fetch; and from
    where."""
    jobs = timeline.jobs
    order = np.asarray(timeline.order, int)
    compute = np.asarray(jobs.compute, int)
    order = order[np.argsort(compute[order], kind="stable")]
    kind, here = order % len(jobs.kinds), compute[order]
    wanted = np.asarray(jobs.weights, int)[order]
    slots, kept, first = _groups(stages, jobs)
    found = []
    for groups in slots:
        group = groups[kind]
        source = np.where(
            kept[group, wanted], wanted, np.where(kept[group, here], here, first[group])
        )
        found.append((group, source, (group >= 0) & (source != here)))
    away, fetch = np.zeros(len(order), bool), np.zeros(len(order), int)
    origin = wanted.copy()
    for group, source, missing in found:
        new = missing.copy()
        for other, its, had in found:  # at hand, because the last job here read them
            new[1:] &= ~(
                had[:-1]
                & (here[1:] == here[:-1])
                & (its[:-1] == source[1:])
                & (other[:-1] == group[1:])
            )
        away |= missing
        origin[new] = source[new]
        fetch += new
    return order, away, fetch, origin


def _groups(stages: nx.DiGraph[int], jobs: Jobs) -> tuple[list[Any], Any, Any]:
    """The groups of weights that kinds of jobs read, -1 for none, as many arrays as the
    most for one; whether a worker keeps a group, and the first that does."""
    nodes = stages.nodes
    default = (FORWARD, BACKWARD)
    read = [
        nodes[s].get("groups", ((s, None),))
        if d in nodes[s].get("reads", default)
        else ()
        for s, d in jobs.kinds
    ]
    owners = {number: kept for groups in read for number, kept in groups}
    count = max(owners, default=-1) + 1
    kept = np.ones((count + 1, jobs.workers), bool)
    first = np.zeros(count + 1, int)
    for number, workers in owners.items():
        if workers is not None:
            kept[number] = False
            kept[number, list(workers)] = True
            first[number] = workers[0]
    most = max(map(len, read), default=0)
    slots = [
        np.array([g[i][0] if i < len(g) else -1 for g in read], int)
        for i in range(most)
    ]
    return slots, kept, first


def worker_records(
    schedule: Schedule, stages: nx.DiGraph[int], timeline: Timeline
) -> tuple[Worker, ...]:
    """What each worker did and held in a step."""
    jobs, count = timeline.jobs, schedule.workers
    compute = np.asarray(jobs.compute, int)
    order = np.asarray(timeline.order, int)
    times = np.asarray(timeline.end) - np.asarray(timeline.start)
    busy = np.bincount(compute[order], times, count)
    ones = peaks(timeline, schedule.release, [1.0] * len(jobs.kinds))
    sizes: list[float] | list[None] = [None] * count
    if all("held" in data for _, data in stages.nodes(data=True)):
        held = [stages.nodes[s]["held"] for s, _ in jobs.kinds]
        sizes = peaks(timeline, schedule.release, held)
    numbers, away, fetched, _ = fetches(stages, timeline)
    here = compute[numbers]
    keepers = owners(jobs)
    kept = np.bincount([w for found in keepers.values() for w in found], None, count)
    received, sent = _messages(jobs)
    returned = np.zeros(count, int)
    for k, (stage, d) in enumerate(jobs.kinds):
        if d is schedule.release:
            root = sum_root(keepers[stage], stage)
            workers = np.unique(compute[k :: len(jobs.kinds)])
            returned[workers[workers != root]] += 1
    columns = (
        busy.tolist(),
        map(int, ones),
        sizes,
        kept.tolist(),
        np.bincount(here, fetched, count).astype(int).tolist(),
        np.bincount(here[away], None, count).tolist(),
        received.tolist(),
        sent.tolist(),
        returned.tolist(),
    )
    return tuple(Worker(*row) for row in zip(*columns, strict=True))


def _messages(jobs: Jobs) -> tuple[Any, Any]:
    """How many messages between jobs each worker receives and sends: one for each job
    and other worker that reads what it made."""
    width, count = len(jobs.kinds), jobs.workers
    compute = np.asarray(jobs.compute, int)
    readers: list[list[int]] = [[] for _ in range(width)]
    for k, before in enumerate(jobs.preds):
        for p in before:
            readers[p].append(k)
    received, sent = np.zeros(count, int), np.zeros(count, int)
    for p, reading in enumerate(readers):
        if not reading:
            continue
        source = compute[p::width]
        to = np.sort(np.stack([compute[k::width] for k in reading], 1), 1)
        new = to != source[:, None]
        new[:, 1:] &= to[:, 1:] != to[:, :-1]
        received += np.bincount(to[new], None, count)
        sent += np.bincount(source, new.sum(1), count).astype(int)
    return received, sent
