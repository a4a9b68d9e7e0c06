"""Puts all jobs of all workers in one global order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx

from ...clock.activations import credits
from ...clock.event_loop import run_jobs
from ...clock.jobs import Jobs, Kind
from ...clock.joint import joint_stages
from ...clock.network import delays
from ...clock.stage_graph import place_jobs
from ...clock.timeline import Timeline
from ...clock.updates import StageUpdate, add_updates, stopped_by_order
from ...ir.graphs import result
from ...ir.meta import of_call
from ...ir.request import Request
from ...ir.step import Step
from ...jobs.job import Direction, PlanError
from ...jobs.schedule import Schedule

FORWARD, BACKWARD, *_ = Direction
Cap = Callable[[int], int | None]


def order_jobs(step: Step, request: Request) -> Step:
    """Runs the schedule on a virtual clock; jobs get the order in which they start.

    before: calls forward_0, forward_1, backward_1, backward_0; 2 microbatches
    after:  step.order: 0F0, 0F1, 1F0, 1B0, 1F1, 0B0, 1B1, 0B1

    A job lasts as long as its call should take, and so does a transfer. Of jobs that
    could start, n decides; a capped F waits for a B (or W): step.credits. If F and B
    are in different calls of the user's (step.deferred), all F come first and there is
    no cap.
    """
    schedule = request.schedule
    if step.deferred and schedule.update_every is not None:
        raise PlanError(
            "updates in the program need a model that returns one scalar loss, from "
            "which B starts; compute the loss in the model, or plan without the "
            "optimizer and update_every="
        )
    calls = _calls(step.graph)
    joint = joint_stages(step.facts.stages)
    jobs = place_jobs(schedule, list(calls), _preds(calls), joint)
    jobs = replace(jobs, waits=_chain_buffers(step.graph, jobs))
    jobs = add_updates(schedule, jobs, _updates(step, request))
    ranked = _forward_first(jobs) if step.deferred else jobs
    of_kind = [of_call(node)["seconds"] for node in calls.values()]
    updates = jobs.kinds[len(calls) :]
    of_kind += [step.facts.stages.nodes[s]["update"] for s, _ in updates]
    seconds = [of_kind[kind] for kind in jobs.kind]
    between = delays(jobs, step.facts.stages, None)

    def run(cap: Cap) -> Timeline:
        limit: Cap = (lambda s: None) if step.deferred else cap
        return run_jobs(
            ranked, seconds, limit, schedule.release, between, schedule.in_order
        )

    timeline = run(schedule.cap)
    if not timeline.complete:
        raise _stuck(schedule, run, timeline)
    timeline = Timeline(jobs, timeline.order, timeline.start, timeline.end)
    room = {} if step.deferred else credits(schedule, timeline)
    waits = {jobs.job(f): jobs.job(last) for f, last in room.items()}
    every = schedule.update_every if jobs.updates else None
    return replace(step, timeline=timeline, credits=waits, every=every)


def _updates(step: Step, request: Request) -> list[StageUpdate]:
    """Who updates the weights of each stage, last stages first, after whose gradients
    and before whose reads. All wait for all, if norms of all gradients count."""
    trained = [group for group in step.facts.groups if any(group.trained)]
    everyone = {stage for group in trained for stage in group.givers}
    waits = request.clip_grad_norm is not None or request.skip_nonfinite
    updates = []
    for stage in sorted({group.stages[0] for group in trained}, reverse=True):
        own = [group for group in trained if group.stages[0] == stage]
        workers = {w for group in own for w in group.updaters}
        givers = {s for group in own for s in group.givers}
        readers = {s for group in own for s in group.stages}
        parts = (workers, everyone if waits else givers, readers)
        pieces = step.facts.pieces
        named = pieces[stage] if pieces else stage
        updates.append(StageUpdate(named, *(tuple(sorted(part)) for part in parts)))
    return updates


def _calls(gm: fx.GraphModule) -> dict[Kind, fx.Node]:
    """The call of each kind of job, in data flow."""
    return {
        (of_call(node)["stage"], of_call(node)["direction"]): node
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
            stage, direction = of_call(node)["stage"], of_call(node)["direction"]
            if direction is BACKWARD:  # it comes after F, though it may not read of it
                reads.add(at[stage, FORWARD])
            preds.append(sorted(reads))
            reads = {at[stage, direction]}
        makers[node] = reads
    return preds


def _forward_first(jobs: Jobs) -> Jobs:
    """The same jobs, with all F before any other by n."""
    forward = [jobs.kinds[kind][1] is FORWARD for kind in jobs.kind]
    pairs = list(zip(jobs.n, forward, strict=True))
    last = max((n for n, is_forward in pairs if is_forward), default=0)
    first = min((n for n, is_forward in pairs if not is_forward), default=0)
    shift = last - first + 1
    return replace(jobs, n=[n if is_forward else n + shift for n, is_forward in pairs])


def _chain_buffers(gm: fx.GraphModule, jobs: Jobs) -> dict[int, list[int]]:
    """Where F writes into buffers, a worker's F run in the order of microbatches."""
    writers = {of_call(node)["stage"] for node in result(gm)["state"].values()}
    last: dict[tuple[int, int], int] = {}
    waits: dict[int, list[int]] = {}
    for number, (kind, worker) in enumerate(zip(jobs.kind, jobs.worker, strict=True)):
        stage, direction = jobs.kinds[kind]
        if direction is FORWARD and stage in writers:
            place = (stage, worker)
            if place in last:
                waits[last[place]] = [number]
            last[place] = number
    return waits


def _stuck(
    schedule: Schedule, run: Callable[[Cap], Timeline], timeline: Timeline
) -> PlanError:
    """What to say of a schedule that stops: the job that waits, and what would work."""
    jobs = timeline.jobs
    done = set(timeline.order)
    starts, readers = jobs.readers
    after = {
        t
        for j in range(len(jobs))
        if j not in done
        for t in (*jobs.waits.get(j, ()), *readers[starts[j] : starts[j + 1]])
    }
    ready = [number for number in range(len(jobs)) if number not in done | after]
    if not run(lambda s: None).complete:
        if error := stopped_by_order(schedule, jobs, ready[0]):
            return error
        buffers = " (F of a stage with buffers run in the order of microbatches)"
        return PlanError(
            f"in_order stops the schedule: {jobs.job(ready[0])} is ready, but its "
            "worker waits for a job with a smaller n that needs it; give n an order "
            "in which every job comes after those that it reads from"
            + buffers
            * bool(jobs.waits)
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
