"""Runs the passes, top to bottom: a traced microbatch becomes a Plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import fx

from .checker.reference import Reference
from .clock.arrivals import ahead_text
from .clock.joint import fit_joint, joint_text
from .draw.tables import ranges
from .draw.whole_stages import shard_text
from .ir.facts import FACTS, Facts, facts
from .ir.graphs import REPLICATED, Role, State, tensors
from .ir.lazy import lazy_module
from .ir.meta import SPENT, of_call, of_node
from .ir.modes import casts, with_casts
from .ir.parts import without_parts
from .ir.request import Request
from .ir.step import Step
from .jobs.job import Direction
from .partition.measure import Known, known_nodes
from .passes.differentiate import differentiate_stages
from .passes.gradient_order import keep_gradient_order
from .passes.partition import assign_stages
from .passes.recompute import mark_recomputed
from .passes.shard import shard_stages
from .passes.share import copy_shared
from .passes.split import split_stages
from .passes.step import ORDERED
from .passes.step.cut import cut_program
from .passes.step.frees import free_values
from .passes.step.order import order_jobs
from .passes.users import Pass, run_passes
from .plans.arithmetic import Arithmetic, describe_arithmetic
from .plans.plan import Plan, Programs
from .progress import Progress

GRAPH_PASSES = (  # rewrite the model's graph; what they find out is in its facts
    mark_recomputed,  # what B computes again of the modules that the user names
    assign_stages,  # every node gets a stage
    shard_stages,  # which is cut into shards, where the schedule has some
    keep_gradient_order,  # what several stages read, where that is asked
    copy_shared,  # cheap values where they are read
    split_stages,  # one node per stage
    differentiate_stages,  # forward and backward calls
)
AFTER_SHARDS = GRAPH_PASSES.index(shard_stages) + 1
STEP_PASSES = (order_jobs, *ORDERED)  # fill in the step of all workers
FEW = 8  # workers that are listed where each updates the stage of its number
PARTS = 1 + len(GRAPH_PASSES) + len(STEP_PASSES)  # of planning; the first is the trace


class StageGraph(NamedTuple):
    """A microbatch as calls of stages, forward and backward, and what is known of it.

    graph: after GRAPH_PASSES. inputs, nodes, arithmetic, half: as Plan has them.
    replicated: whether there are draws that are the same in all microbatches.
    """

    graph: fx.GraphModule
    inputs: tuple[State, ...]
    nodes: Mapping[str, Known]
    arithmetic: Arithmetic
    half: bool
    replicated: bool


def cut_stages(
    gm: fx.GraphModule, request: Request, passes: tuple[Pass, ...], progress: Progress
) -> StageGraph:
    """A traced microbatch, cut into stages that are differentiated.

    progress: is told of each pass.
    """
    progress.after(gm)
    nodes = list(gm.graph.nodes)
    inputs = tuple(
        State(of_call(node)["index"], of_node(node)["role"], of_call(node)["name"])
        for node in nodes
        if of_node(node).get("role") in (Role.BATCH, Role.SHARED)
    )
    arithmetic = describe_arithmetic(gm, request, passes)
    for number, rewrite in enumerate(GRAPH_PASSES, 2):
        progress.at(rewrite.__name__, number, PARTS)
        gm = rewrite(gm, request)
        progress.after(gm)
        request = replace(request, schedule=facts(gm).schedule or request.schedule)
    half = any(
        t.dtype is torch.float16 and t.requires_grad
        for node in nodes
        for t in tensors(of_call(node).get("val"))
    )
    replicated = any(node.meta.get(REPLICATED) for node in nodes)
    known = known_nodes(nodes)
    _forget(gm)
    return StageGraph(gm, inputs, known, arithmetic, half, replicated)


def _forget(gm: fx.GraphModule) -> None:
    """Takes from the nodes what plans on disk have not, so that nothing reads it."""
    for node in gm.graph.nodes:
        for key in SPENT:
            node.meta.pop(key, None)


def make_plan(
    cut: StageGraph, request: Request, passes: tuple[Pass, ...], progress: Progress
) -> Plan:
    """The plan of a microbatch's stages; the user's passes run on each program.

    progress: is told of each pass.
    """
    gm = cut.graph
    whole = _without_shards(cut, request)
    schedule = facts(gm).schedule or request.schedule
    request = replace(request, schedule=fit_joint(schedule, facts(gm).stages))
    step = Step(gm)
    for number, fill in enumerate(STEP_PASSES, 2 + len(GRAPH_PASSES)):
        progress.at(fill.__name__, number, PARTS)
        step = fill(step, request)
        progress.after(step)

    reference = Reference(gm, request, step.jobs)

    def steps(prefetch: int) -> Step:
        other, again = Step(gm), replace(request, prefetch=prefetch)
        for fill in STEP_PASSES:
            other = fill(other, again)
        return other

    def write(worker: int) -> fx.GraphModule:
        program = lazy_module(gm, cut_program(step, request, worker), "Program")
        if passes:
            program = run_passes(program, request, worker, passes)
        free_values(program.graph)
        program.recompile()
        return program

    return Plan(
        request.schedule,
        step.facts.stages,
        Programs(request.schedule.workers, write),
        step.facts.groups,
        tuple(output for output in step.facts.outputs if not output.kept),
        step.facts.loss,
        step,
        steps,
        reference,
        _notes(step, request),
        cut.nodes,
        cut.inputs,
        cut.arithmetic,
        draws=bool(step.draws),
        redraws=cut.replicated or _redraws(step),
        half=cut.half,
        linear=step.facts.linear,
        current=bool(request.updates),
        by_arrival=request.by_arrival and step.every is not None,
        gradient_dtype=request.gradient_dtype,
        state_bytes=request.state_bytes,
        network=request.network,
        parts=facts(gm).parts,
        cuts=facts(gm).cuts,
        whole=whole,
        said=tuple(filter(None, _said(step.facts))),
        compared=step.facts.compared,
    )


def _said(known: Facts) -> Iterator[str]:
    """What explain() says of the model besides, where there is something to say."""
    yield from (known.meeting, known.totals, known.sliced, known.again)
    yield str(known.compared or "")


def _without_shards(cut: StageGraph, request: Request) -> Callable[[], Plan] | None:
    """Plans the same schedule, where shard 0 has all of each stage, once it is asked
    to; None for a schedule without shards."""
    gm = facts(cut.graph).whole
    if gm is None:
        return None
    known = facts(gm)
    schedule = replace(known.schedule or request.schedule, shards=1)
    updates = without_parts(request.updates, facts(cut.graph).parts)
    request = replace(request, schedule=schedule, owners={}, cuts={}, updaters={})
    request = replace(request, updates=updates)
    gm.meta[FACTS] = replace(known, schedule=schedule)
    then = casts()

    @cache
    def make() -> Plan:
        with with_casts(then), Progress() as progress:
            whole = gm
            for rewrite in GRAPH_PASSES[AFTER_SHARDS:]:
                progress.at(rewrite.__name__)
                whole = rewrite(whole, request)
            return make_plan(cut._replace(graph=whole), request, (), progress)

    return make


def _notes(step: Step, request: Request) -> tuple[str, ...]:
    """Joint stages and updates, if there are any; what the user asked for and does not
    get."""
    said = filter(None, (step.facts.pairs, step.facts.norms))
    updates, unmet = _updates(step, request), _unmet(step, request)
    notes = (*_joint(step, request), *said, *updates, *unmet)
    if request.device is None:
        return notes
    return (*notes, f"costs are estimates for device={request.device!r}")


def _joint(step: Step, request: Request) -> Iterator[str]:
    """The global-batch stages, and which workers they leave without a job."""
    jobs = step.jobs
    idle = set(range(jobs.workers)).difference(jobs.worker[: jobs.regular])
    for line in joint_text(request.schedule, step.facts.stages):
        many = len(idle) > 1
        none = f"; worker{'s' * many} {ranges(sorted(idle))} run{'s' * (not many)} none"
        yield line + none * bool(idle)


def _updates(step: Step, request: Request) -> tuple[str, ...]:
    """How often the optimizer steps, and on which workers."""
    jobs = step.jobs
    stages: dict[int, dict[str, None]] = {}  # by worker
    for number in sorted(jobs.updates, key=jobs.job):
        stage = jobs.job(number).stage
        stages.setdefault(jobs.worker[number], {})[shard_text(stage)] = None
    if not stages:
        return ()
    where = ", ".join(
        f"{'+'.join(stages[worker])} on {worker}" for worker in sorted(stages)
    )
    if len(stages) > FEW and all(list(own) == [str(k)] for k, own in stages.items()):
        where = f"each on the worker of its number, {ranges(sorted(stages))}"
    every = f"every {step.every} microbatches"
    if request.by_arrival:
        every = f"of each microbatch, {ahead_text(request.schedule.ahead)}"
    line, schedule = f"updates {every}; of stages on workers: {where}", request.schedule
    if schedule.average_every is None:
        return (line,)
    how = "" if schedule.elastic is None else f", elastic by {schedule.elastic:g}"
    if schedule.outer is not None:
        how = ", with an outer step of lr {:g}, momentum {:g}".format(*schedule.outer)
    return (line, f"replicas averaged every {schedule.average_every} updates{how}")


def _unmet(step: Step, request: Request) -> tuple[str, ...]:
    """What the user asked for and does not get."""
    trains = any(direction is Direction.BACKWARD for _, direction in step.jobs.kinds)
    caps = {request.schedule.cap(stage) for stage, _ in step.jobs.kinds}
    if not (trains and step.deferred) or caps == {None}:
        return ()
    return (
        "in_flight is not applied: the model returns no scalar loss, so all F run in "
        "the call and all B in backward(); let the model return its loss for that",
    )


def _redraws(step: Step) -> bool:
    """Plan.redraws."""
    jobs = step.jobs
    return any(
        jobs.worker[number] != jobs.worker[jobs.find(forward, jobs.rows[number])]
        for s, d in step.draws
        if d is Direction.BACKWARD
        for forward in (jobs.at[s, Direction.FORWARD],)
        for number in jobs.of(jobs.at[s, d])
    )
