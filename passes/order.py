"""Puts all jobs of all workers in one global order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx

from ..clock.activations import credits
from ..clock.event_loop import run_jobs
from ..clock.stage_graph import Edges, place_jobs
from ..clock.timeline import Jobs, Kind, Timeline
from ..ir.graphs import result
from ..ir.request import Request
from ..ir.step_ir import StepIR
from ..jobs import Direction, PlanError, Schedule

FORWARD, BACKWARD, _ = Direction
Cap = Callable[[int], int | None]


def order_jobs(step: StepIR, request: Request) -> StepIR:
    """Runs the schedule on a virtual clock; jobs get the order in which they start.

    before: calls forward_0, forward_1, backward_1, backward_0; 2 microbatches
    after:  step.order: 0F0, 0F1, 1F0, 1B0, 1F1, 0B0, 1B1, 0B1

    A job lasts as long as its call should take, and so does a transfer. Of jobs that
    could start, n decides; a capped F waits for a B (or W): step.credits. If F and B
    are in different calls of the user's (step.late), all F come first and there is no
    cap.
    """
    schedule = request.schedule
    calls = _calls(step.graph)
    jobs = place_jobs(schedule, list(calls), _preds(calls))
    jobs = replace(jobs, more=_chain_buffers(step.graph, jobs))
    ranked = _forward_first(jobs) if step.late else jobs
    seconds = [node.meta["seconds"] for node in calls.values()] * jobs.microbatches
    edges = Edges(jobs, step.facts.stages)

    def run(cap: Cap) -> Timeline:
        limit: Cap = (lambda s: None) if step.late else cap
        return run_jobs(
            ranked, seconds, limit, schedule.release, edges, schedule.in_order
        )

    timeline = run(schedule.cap)
    if not timeline.complete:
        raise _stuck(schedule, run, timeline)
    timeline = Timeline(jobs, timeline.order, timeline.start, timeline.end)
    room = {} if step.late else credits(schedule, timeline)
    waits = {jobs.job(f): jobs.job(last) for f, last in room.items()}
    return replace(step, timeline=timeline, credits=waits)


def _calls(gm: fx.GraphModule) -> dict[Kind, fx.Node]:
    """The call of each kind of job, in data flow."""
    return {
        (node.meta["stage"], node.meta["direction"]): node
        for node in gm.graph.nodes
        if node.op == "call_module"
    }


def _preds(calls: Mapping[Kind, fx.Node]) -> list[list[int]]:
    """For each call, the calls whose values it reads, within one microbatch."""
    at = {kind: i for i, kind in enumerate(calls)}
    makers: dict[fx.Node, set[int]] = {}
    preds: list[list[int]] = []
    if not calls:
        return preds
    for node in next(iter(calls.values())).graph.nodes:
        reads = {call for p in node.all_input_nodes for call in makers.get(p, ())}
        if node.op == "call_module":
            stage, direction = node.meta["stage"], node.meta["direction"]
            if direction is BACKWARD:  # it comes after F, though it may not read of it
                reads.add(at[stage, FORWARD])
            preds.append(sorted(reads))
            reads = {at[stage, direction]}
        makers[node] = reads
    return preds


def _forward_first(jobs: Jobs) -> Jobs:
    """The same jobs, with all F before any other by n."""
    forward = [d is FORWARD for _, d in jobs.kinds] * jobs.microbatches
    pairs = list(zip(jobs.n, forward, strict=True))
    last = max((n for n, is_forward in pairs if is_forward), default=0)
    first = min((n for n, is_forward in pairs if not is_forward), default=0)
    shift = last - first + 1
    return replace(jobs, n=[n if is_forward else n + shift for n, is_forward in pairs])


def _chain_buffers(gm: fx.GraphModule, jobs: Jobs) -> dict[int, list[int]]:
    """Where F writes into buffers, a worker's F run in the order of microbatches."""
    writers = {node.meta["stage"] for node in result(gm)["state"].values()}
    last: dict[tuple[int, int], int] = {}
    more: dict[int, list[int]] = {}
    for number, worker in enumerate(jobs.compute):
        stage, direction = jobs.kinds[number % len(jobs.kinds)]
        if direction is FORWARD and stage in writers:
            place = (stage, worker)
            if place in last:
                more[last[place]] = [number]
            last[place] = number
    return more


def _stuck(
    schedule: Schedule, run: Callable[[Cap], Timeline], timeline: Timeline
) -> PlanError:
    """What to say of a schedule that stops: the job that waits, and what would work."""
    jobs = timeline.jobs
    done, width = set(timeline.order), len(jobs.kinds)
    after = {t for j, more in jobs.more.items() if j not in done for t in more}
    ready = [
        number
        for number in range(len(jobs))
        if number not in done | after
        and all(number - number % width + p in done for p in jobs.preds[number % width])
    ]
    if not run(lambda s: None).complete:
        buffers = " (F of a stage with buffers run in the order of microbatches)"
        return PlanError(
            f"in_order stops the schedule: {jobs.job(ready[0])} is ready, but its "
            "worker waits for a job with a smaller n that needs it; give n an order "
            "in which every job comes after those that it reads from"
            + buffers
            * bool(jobs.more)
        )
    caps = {s: schedule.cap(s) for s, _ in jobs.kinds}
    waiting = next(
        job
        for job in map(jobs.job, ready)
        if job.direction is FORWARD and caps[job.stage] is not None
    )
    for extra in range(1, schedule.microbatches + 1):
        raised = {s: c if c is None else max(c, 0) + extra for s, c in caps.items()}
        if run(raised.__getitem__).complete:
            break
    values = sorted({c for c in raised.values() if c is not None})
    if callable(schedule.in_flight):
        works = f"one that is larger by {extra} for every stage works"
    else:
        works = f"the smallest that works is {values[0]}"
    stopped = f"no {schedule.release} can run"
    if schedule.in_order:
        stopped = f"{schedule.release} comes after it in the order of n"
    return PlanError(
        f"in_flight stops the schedule: {waiting} waits for room on its worker, which "
        f"allows {caps[waiting.stage]} microbatches of stage {waiting.stage} between F "
        f"and {schedule.release}, and {stopped}; {works}"
    )
