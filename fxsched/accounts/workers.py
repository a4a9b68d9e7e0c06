"""What each worker does and holds in a simulated step, counted."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx
import numpy as np

from ..clock.activations import Parked, peaks
from ..clock.jobs import Jobs
from ..clock.timeline import Timeline
from ..ir import ops
from ..ir.graphs import Role
from ..ir.step import Message, Step
from ..jobs.job import Direction, Job, Piece
from ..jobs.schedule import Schedule
from .traffic import traffic


@dataclass(frozen=True)
class Worker:
    """What one worker did and held in a simulated step.

    busy: the time in which the worker ran jobs.
    peak_activations: the most microbatches of stages between F and B (W, if the
        backward is split). They count from the start of F, for the worker that runs B;
        while they wait elsewhere, for the worker that they wait on, if it is one.
    peak_bytes: the most bytes of activations, if the stages have `held`.
    weights_held: the number of stages whose weights the worker keeps.
    weight_fetches: how often the worker fetched a stage's weights. As in a real run, it
        keeps fetched weights while its next job reads them too.
    weight_transmissions: how many jobs it ran whose weights another worker keeps. This
        is the count of parallelsim, which fetches weights for every job.
    activations_received, activations_sent: values that jobs made for jobs on another
        worker, once for each value and worker: outputs of F, gradients of B, tensors
        that F saved.
    gradients_returned: sums of weight gradients sent to the worker that adds them up.
    updates: steps of the optimizer that the worker ran, one for each stage.
    weights_renewed: weights of the worker that it received after an update, from the
        worker that u names, or from the worker that averages replicas.
    parameter_bytes: bytes of weights and of their gradients that the worker received,
        if the stages have these sizes.
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
    """A Worker for each worker of a step whose jobs ran at these times."""
    jobs, count = timeline.jobs, schedule.workers
    compute = jobs.columns.worker
    order = np.asarray(timeline.order, int)
    times = np.asarray(timeline.end) - np.asarray(timeline.start)
    busy = np.bincount(compute[order], times, count).tolist()
    first = _first_pieces(jobs)
    counts, parked = [float(s in first) for s, _ in jobs.kinds], _parked(step, timeline)
    ones = peaks(timeline, schedule.release, counts, parked=parked)
    sizes: list[float] | list[None] = [None] * count
    if all("held" in data for _, data in stages.nodes(data=True)):
        saved = [stages.nodes[s]["held"] for s, _ in jobs.kinds]
        sizes = peaks(timeline, schedule.release, saved, parked=parked)
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


def _parked(step: Step, timeline: Timeline) -> list[Parked]:
    """The activations that wait elsewhere: from the end of F, until the job starts
    before which they come back."""
    jobs, found = timeline.jobs, dict[int, Parked]()
    if not jobs.saved:
        return []
    starts = dict(zip(timeline.order, timeline.start, strict=True))
    ends = dict(zip(timeline.order, timeline.end, strict=True))
    coming: dict[int, list[int]] = {}  # F, by the worker to which they come back
    for op in step.ops:
        if op.target is ops.reload:
            job = Job.parse(op.task.removeprefix("reload "))
            made = jobs.number(job._replace(direction=Direction.FORWARD))
            coming.setdefault(jobs.worker[jobs.number(job)], []).append(made)
        elif op.job is not None and (back := coming.pop(op.worker, None)):
            start = starts[jobs.number(op.job, op.worker)]
            for f in back:
                where = jobs.saved[f]
                worker = where if isinstance(where, int) else None
                found.setdefault(f, Parked(f, worker, ends[f], start))
    return [*found.values()]


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
