"""What a worker holds, in bytes by kind; the most of it, where nothing is updated."""

from __future__ import annotations

from typing import NamedTuple

import networkx as nx

from ..jobs.schedule import Schedule
from .jobs import Jobs, weight_owners
from .stage_graph import worker_bytes
from .timeline import Timeline


class Memory(NamedTuple):
    """Bytes that a worker holds at one time, by kind.

    weights: weights that the worker keeps, the newest version.
    versions: older versions that jobs still read, copies that are being sent, and what
        F wrote into buffers, besides the buffers' old values.
    fetched: weights of other workers.
    gradients: sums of gradients, of the worker's own weights and of others'.
    state: the optimizer's state.
    activations: activations of microbatches between F and B (or W).
    temporary: what a job holds only while it runs.
    """

    weights: float = 0.0
    versions: float = 0.0
    fetched: float = 0.0
    gradients: float = 0.0
    state: float = 0.0
    activations: float = 0.0
    temporary: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return sum(self)


class Peaks(NamedTuple):
    """The most bytes that a worker holds in a step.

    at_once: the bytes of each kind when the worker holds the most in total.
    each: the most bytes of each kind, whenever that is.
    host, disk: the most bytes of activations that wait there, outside of its memory.
    """

    at_once: Memory
    each: Memory
    host: float = 0.0
    disk: float = 0.0


def worker_totals(
    schedule: Schedule, stages: nx.DiGraph[int], timeline: Timeline, kept: float = 1.0
) -> list[Memory]:
    """What each worker holds when that is most, in a step without updates: the
    optimizer's state, and weights with their gradients, which stay, and activations."""
    held = worker_bytes(schedule, stages, timeline, kept)
    states = state_held(schedule, stages, timeline.jobs)
    pairs = zip(held, states, strict=True)
    return [Memory(weights=size, state=state) for size, state in pairs]


def state_held(schedule: Schedule, stages: nx.DiGraph[int], jobs: Jobs) -> list[float]:
    """Bytes of the optimizer's state on each worker, of the weights that it updates."""
    held = [0.0] * schedule.workers
    for stage, owners in weight_owners(jobs).items():
        trained = (stage, schedule.release) in jobs.at
        updater = schedule.updater(stage) if trained else None
        for worker in owners if updater is None else (updater,):
            held[worker] += float(stages.nodes[stage].get("state", 0.0))
    return held
