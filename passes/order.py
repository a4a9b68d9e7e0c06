"""Puts all jobs of all workers in one global order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from ..eventloop import Event, run_jobs
from ..graphs import result
from ..jobs import Direction, Job, PlanError, Schedule
from ..request import Request
from ..simulate import transfers

FORWARD, BACKWARD = Direction
Cap = Callable[[int], int | None]


def order_jobs(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """Runs the schedule on a virtual clock; jobs get the order in which they start.

    before: calls forward_0, forward_1, backward_1, backward_0; 2 microbatches
    after:  gm.meta["jobs"] = [0F0, 0F1, 1F0, 1B0, 1F1, 0B0, 1B1, 0B1]

    A job lasts as long as its call should take, and so does a transfer. Of jobs that
    could start, n decides; a capped F waits for a B. If F and B are in different calls
    of the user's (gm.meta["loss"] is None), all F come first and there is no cap.
    gm.meta["preds"] keeps what each job waits for, gm.meta["credits"] the B that each
    capped F waits for.
    """
    schedule = request.schedule
    stages = _stage_preds(gm)
    work = _durations(gm)
    split = gm.meta["loss"] is None
    preds: dict[Job, list[Job]] = {}
    for b in range(schedule.microbatches):
        for (stage, direction), before in stages.items():
            preds[Job(stage, b, direction)] = [Job(s, b, d) for s, d in before]
    placements = {job: schedule.place(job) for job in preds}
    worker = {job: placement.compute for job, placement in placements.items()}
    n = {job: schedule.priority(job) for job in preds}
    _chain_buffers(gm, preds, worker)
    if split:
        last = max((n[j] for j in n if j.direction is FORWARD), default=0)
        first = min((n[j] for j in n if j.direction is BACKWARD), default=0)
        for job in n:
            n[job] += (last - first + 1) * (job.direction is BACKWARD)

    delay = transfers(gm.meta["stages"])

    def run(cap: Cap) -> list[Event]:
        limit = (lambda s: None) if split else cap
        return run_jobs(
            preds, worker, n, lambda j: work[j.stage, j.direction], limit, delay
        )

    events = run(schedule.cap)
    if len(events) < len(preds):
        raise _stuck(schedule, run, preds, {event.job for event in events})
    jobs = [event.job for event in events]
    if split:
        jobs.sort(key=lambda job: job.direction is BACKWARD)
    gm.meta["jobs"] = jobs
    gm.meta["placements"] = placements
    gm.meta["n"] = n if not split else {job: schedule.priority(job) for job in preds}
    gm.meta["preds"] = preds
    gm.meta["credits"] = {} if split else _credits(schedule, jobs, worker)
    return gm


def _stage_preds(
    gm: fx.GraphModule,
) -> dict[tuple[int, Direction], list[tuple[int, Direction]]]:
    """For each call, the calls whose values it reads, within one microbatch."""
    result: dict[tuple[int, Direction], list[tuple[int, Direction]]] = {}
    made: dict[fx.Node, set[tuple[int, Direction]]] = {}
    for node in gm.graph.nodes:
        reads = {call for p in node.all_input_nodes for call in made.get(p, ())}
        if node.op == "call_module":
            call = (node.meta["stage"], node.meta["direction"])
            if call[1] is BACKWARD:  # B comes after F, though it may read nothing of it
                reads.add((call[0], FORWARD))
            result[call] = sorted(reads, key=lambda c: (c[1].value, c[0]))
            reads = {call}
        made[node] = reads
    return result


def _durations(gm: fx.GraphModule) -> dict[tuple[int, Direction], float]:
    """Seconds of each call."""
    return {
        (node.meta["stage"], node.meta["direction"]): node.meta["seconds"]
        for node in gm.graph.nodes
        if node.op == "call_module"
    }


def _chain_buffers(
    gm: fx.GraphModule, preds: dict[Job, list[Job]], worker: Mapping[Job, int]
) -> None:
    """Where F writes into buffers, a worker's F run in the order of microbatches."""
    writers = {node.meta["stage"] for node in result(gm)["state"].values()}
    last: dict[tuple[int, int], Job] = {}
    for job in preds:
        if job.direction is FORWARD and job.stage in writers:
            place = (job.stage, worker[job])
            if place in last:
                preds[job].append(last[place])
            last[place] = job


def _credits(
    schedule: Schedule, jobs: Sequence[Job], worker: Mapping[Job, int]
) -> dict[Job, Job]:
    """The B that makes room for each capped F, first out first in."""
    holder = {j[:2]: worker[j] for j in jobs if j.direction is BACKWARD}
    room: dict[tuple[int, int], list[Job]] = {}
    used: dict[tuple[int, int], int] = {}
    result = {}
    for job in jobs:
        if job[:2] not in holder:
            continue
        place = (job.stage, holder[job[:2]])
        if job.direction is BACKWARD:
            room.setdefault(place, []).append(job)
            continue
        limit = schedule.cap(job.stage)
        taken = used[place] = used.get(place, 0) + 1
        if limit is not None and taken > limit:
            result[job] = room[place][taken - limit - 1]
    return result


def _stuck(
    schedule: Schedule,
    run: Callable[[Cap], list[Event]],
    preds: Mapping[Job, Sequence[Job]],
    done: set[Job],
) -> PlanError:
    waiting = next(
        job
        for job, before in preds.items()
        if job not in done and all(p in done for p in before)
    )
    caps = {s: schedule.cap(s) for s in sorted({job.stage for job in preds})}
    for extra in range(1, schedule.microbatches + 1):
        raised = {s: c if c is None else max(c, 0) + extra for s, c in caps.items()}
        if len(run(raised.__getitem__)) == len(preds):
            break
    values = sorted({c for c in raised.values() if c is not None})
    if callable(schedule.in_flight):
        works = f"one that is larger by {extra} for every stage works"
    else:
        works = f"the smallest that works is {values[0]}"
    return PlanError(
        f"in_flight stops the schedule: {waiting} waits for room on its worker, which "
        f"allows {caps[waiting.stage]} microbatches of stage {waiting.stage} between F "
        f"and B, and no B can run; {works}"
    )
