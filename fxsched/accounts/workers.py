"""What each worker does and holds in a simulated step, counted."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx
import numpy as np

from ..clock.activations import peaks
from ..clock.jobs import Jobs
from ..clock.timeline import Timeline
from ..ir.graphs import Role
from ..ir.step import Message, Step
from ..jobs.job import Piece
from ..jobs.schedule import Schedule
from .traffic import traffic


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
        once for each value and worker: outputs of F, gradients of B, what F saved.
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
    schedule: Schedule, stages: nx.DiGraph[int], timeline: Timeline, step: Step
) -> tuple[Worker, ...]:
    """What each worker did and held in a step, whose jobs ran at these times."""
    jobs, count = timeline.jobs, schedule.workers
    compute = jobs.columns.worker
    order = np.asarray(timeline.order, int)
    times = np.asarray(timeline.end) - np.asarray(timeline.start)
    busy = np.bincount(compute[order], times, count).tolist()
    first = _first_pieces(jobs)
    ones = peaks(timeline, schedule.release, [float(s in first) for s, _ in jobs.kinds])
    sizes: list[float] | list[None] = [None] * count
    if all("held" in data for _, data in stages.nodes(data=True)):
        saved = [stages.nodes[s]["held"] for s, _ in jobs.kinds]
        sizes = peaks(timeline, schedule.release, saved)
    sized = all("weights" in data for _, data in stages.nodes(data=True))
    updates = np.bincount(compute[jobs.regular :], None, count).tolist()
    held, away, moved = _held(step, first), _away(step), traffic(step)
    return tuple(
        Worker(
            busy[w],
            int(ones[w]),
            sizes[w],
            held[w],
            moved[w].fetches,
            away[w],
            moved[w].activations_received,
            moved[w].activations_sent,
            moved[w].returned,
            updates[w],
            moved[w].renewed,
            int(moved[w].parameters) if sized else None,
        )
        for w in range(count)
    )


def _first_pieces(jobs: Jobs) -> set[int]:
    """The stages; of those that are pieces of a shard, the first that it has."""
    first: dict[object, int] = {}
    for s in sorted({s for s, _ in jobs.kinds}):
        first.setdefault((s.stage, s.shard) if isinstance(s, Piece) else s, s)
    return set(first.values())


def _held(step: Step, first: set[int]) -> list[int]:
    """How many stages' weights each worker keeps."""
    kept: list[set[int]] = [set() for _ in range(step.jobs.workers)]
    for group in step.facts.groups:
        own = any(state.role is not Role.SHARED for state in group.state)
        for worker in group.owners if own and group.stages[0] in first else ():
            kept[worker].add(group.stages[0])
    return list(map(len, kept))


def _away(step: Step) -> list[int]:
    """How many jobs of each worker read weights that others keep."""
    away = [0] * step.jobs.workers
    for op in step.ops:
        if op.target is None and op.job is not None:
            read = op.args[0]
            away[op.worker] += any(isinstance(value, Message) for value in read)
    return away
