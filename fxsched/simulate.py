"""When a schedule's jobs run, and what its workers hold, from its stages alone.

Stages are a networkx.DiGraph. Nodes have `forward` and `backward` (seconds for one
microbatch; a stage with `backward` 0 has no B), `held` (bytes between F and B) and
`weights` (bytes of weights and their gradients); edges have `seconds`, one way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import networkx as nx

from .eventloop import Event, run_jobs
from .jobs import Direction, Job, Schedule

FORWARD, BACKWARD = Direction


def stage_jobs(schedule: Schedule, stages: nx.DiGraph[int]) -> dict[Job, list[Job]]:
    """All jobs, each with those whose values it reads."""
    found: dict[Job, list[Job]] = {}
    back = {s for s, seconds in stages.nodes(data="backward") if seconds}
    for b in range(schedule.microbatches):
        for s in stages:
            before = [Job(p, b, FORWARD) for p in stages.predecessors(s)]
            found[Job(s, b, FORWARD)] = before
        for s in stages:
            if s in back:
                after = [Job(r, b, BACKWARD) for r in stages.successors(s) if r in back]
                found[Job(s, b, BACKWARD)] = [Job(s, b, FORWARD), *after]
    return found


def run_stages(schedule: Schedule, stages: nx.DiGraph[int]) -> list[Event]:
    """The jobs in the order in which they start; fewer if in_flight stops them."""
    preds = stage_jobs(schedule, stages)
    times = {
        (s, d): stages.nodes[s]["forward" if d is FORWARD else "backward"]
        for s in stages
        for d in Direction
    }
    return run_jobs(
        preds,
        {job: schedule.place(job).compute for job in preds},
        {job: schedule.priority(job) for job in preds},
        lambda job: times[job.stage, job.direction],
        schedule.cap,
        transfers(stages),
    )


def transfers(stages: nx.DiGraph[int]) -> Callable[[Job, Job], float]:
    """Seconds from a job's end to another's start, for what it reads of that job."""
    links: dict[tuple[int, int], float] = {}
    for maker, reader, data in stages.edges(data=True):
        links[maker, reader] = links[reader, maker] = data["seconds"]

    def delay(pred: Job, job: Job) -> float:
        return links.get((pred.stage, job.stage), 0.0)

    return delay


def step_seconds(events: Iterable[Event]) -> float:
    return max((event.end for event in events), default=0.0)


def likely_seconds(schedule: Schedule, stages: nx.DiGraph[int]) -> float:
    """The mean step over stages that are each up to 4 % slower or faster: one order of
    jobs may be lucky for exactly these times. Infinite if in_flight stops the jobs."""
    jobs = len(stage_jobs(schedule, stages))
    found = []
    for k in range(3):
        other = stages.copy()
        for s, data in other.nodes(data=True):
            for what, i in (("forward", 0), ("backward", 1)):
                data[what] *= 1 + 0.02 * ((7 * s + 3 * k + i) % 5 - 2)
        events = run_stages(schedule, other)
        found.append(step_seconds(events) if len(events) == jobs else float("inf"))
    return sum(found) / len(found)


def worker_bytes(
    schedule: Schedule, stages: nx.DiGraph[int], events: Iterable[Event]
) -> list[float]:
    """The most that each worker holds: weights, their gradients, and activations."""
    weights = [0.0] * schedule.workers
    events = list(events)
    for stage, worker in sorted(
        {(e.job.stage, schedule.place(e.job).weights) for e in events}
    ):
        weights[worker] += stages.nodes[stage]["weights"]
    holder = {e.job[:2]: e.worker for e in events if e.job.direction is BACKWARD}
    held: Counter[int] = Counter()
    most: Counter[int] = Counter()
    changes = []  # at a time, B gives back before F takes
    for event in events:
        if event.job[:2] in holder:
            size, place = stages.nodes[event.job.stage]["held"], holder[event.job[:2]]
            if event.job.direction is FORWARD:
                changes.append((event.start, 1, place, size))
            else:
                changes.append((event.end, 0, place, -size))
    for _, _, place, size in sorted(changes):
        held[place] += size
        most[place] = max(most[place], held[place])
    return [weights[w] + most[w] for w in range(schedule.workers)]
