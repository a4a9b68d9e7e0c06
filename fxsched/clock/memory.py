"""What each worker holds in a step of stages without a model, in bytes by kind.

Jobs run in the order of a timeline, and what a worker takes and lets go of is told in
that order, as its program does it:

- sums of gradients, from the first job that gives some: until the sum is sent to the
  worker that adds them up, there until the update, or the step's end without one;
- older versions of weights, from the update that takes their place, or the first job
  elsewhere that reads them, until the last job that does;
- weights that others keep, from so many jobs ahead until the last job in a row that
  reads them; new ones on their way to a copy, and the copy that they are sent from;
- activations, from F to B (or W).

Weights and the optimizer's state stay. What one job needs while it runs comes on top.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import networkx as nx
import numpy as np

from ..jobs.schedule import Schedule
from .memory_changes import Change, StepChanges
from .stage_graph import worker_bytes
from .timeline import Timeline
from .weight_groups import groups_of_kinds, stage_weights
from .weight_traffic import state_held


class Memory(NamedTuple):
    """Bytes that a worker holds at one time.

    weights: those that it keeps, the newest. versions: older ones of these that jobs
    still read, copies that are being sent, and what F wrote into buffers, beside what
    they were. fetched: those of other workers.
    gradients: sums of them, its own and others'. state: of the optimizer.
    activations: of microbatches between F and B (or W).
    """

    weights: float = 0.0
    versions: float = 0.0
    fetched: float = 0.0
    gradients: float = 0.0
    state: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return sum(self)


class Peaks(NamedTuple):
    """at_once: what a worker holds when that is most. each: the most of each kind,
    whenever that is."""

    at_once: Memory
    each: Memory


def worker_memory(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    timeline: Timeline,
    prefetch: int = 1,
    kept: float = 1.0,
) -> list[Peaks]:
    """The most that each worker holds.

    prefetch: for how many jobs ahead a worker asks for weights of others.
    kept: the share of activations that is still there between B and W.
    """
    jobs = timeline.jobs
    reads, gives = groups_of_kinds(stages, jobs)
    groups = stage_weights(schedule, stages, jobs)
    step = StepChanges(schedule, jobs, timeline.order, groups, reads, gives, prefetch)
    held = [float(stages.nodes[s].get("held", 0.0)) for s, _ in jobs.kinds]
    changes = chain(
        step.resident(),
        step.gradients(),
        step.versions(),
        step.renewals(),
        step.fetches(),
        step.activations(held, kept),
        step.read_whole(nx.get_edge_attributes(stages, "whole")),
    )
    return _peaks(jobs.workers, list(changes))


def held_memory(
    schedule: Schedule, stages: nx.DiGraph[int], timeline: Timeline, kept: float = 1.0
) -> list[Memory]:
    """What each worker holds when that is most, by kind where there are updates; else
    the optimizer's state, and weights with their gradients, which then stay, and
    activations."""
    if schedule.update_every is None:
        held = worker_bytes(schedule, stages, timeline, kept)
        states = state_held(schedule, stages, timeline.jobs)
        pairs = zip(held, states, strict=True)
        return [Memory(weights=size, state=state) for size, state in pairs]
    found = worker_memory(schedule, stages, timeline, kept=kept)
    return [peaks.at_once for peaks in found]


def _peaks(workers: int, changes: list[Change]) -> list[Peaks]:
    """Of changes at one time and worker, those told first come first."""
    by_worker: list[list[Change]] = [[] for _ in range(workers)]
    for change in changes:
        by_worker[change[1]].append(change)
    found = []
    for own in by_worker:
        own.sort(key=lambda change: change[0])
        held = np.zeros((len(own) + 1, len(Memory._fields)))
        kinds = [kind for _, _, kind, _ in own]
        held[np.arange(1, len(own) + 1), kinds] = [size for *_, size in own]
        held = np.cumsum(held, axis=0)
        most = held[held.sum(axis=1).argmax()]
        found.append(Peaks(Memory(*most.tolist()), Memory(*held.max(0).tolist())))
    return found
