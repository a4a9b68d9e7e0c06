"""From a call of the compiled function to its plan, and to the step that runs it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.optim import Optimizer

from .autodiff import inductor
from .capture.batch import Batch, batch_of
from .capture.batch_norms import Norms
from .capture.graph_inputs import call_text
from .capture.meta_device import refuse_meta
from .capture.trace import Traced, trace_microbatch
from .checker.summary import CheckError
from .ir.early import Early
from .ir.facts import facts
from .ir.garbage import no_collection
from .ir.graphs import Specs, result
from .ir.parts import bytes_of_parts, in_parts
from .ir.request import LossReduction, Request
from .jobs.job import PlanError
from .jobs.schedule import Schedule
from .memory_limit import plan_within
from .norms import trace_norms
from .options import Options
from .pairs import trace_pairs
from .params.call_parts import CallParts
from .params.corrections import Corrections
from .params.optimizer_steps import guard
from .params.optimizer_trials import check_apart
from .params.optimizers import state_bytes
from .params.record import placed, specs_of
from .params.replicas import ReplicaOptimizers, moment_specs
from .params.updates import StageOptimizers, positions_of
from .passes.model_passes import run_model_passes
from .passes.partition import assign_stages
from .passes.users import Pass, pass_name
from .pipeline import PARTS, StageGraph, cut_stages, make_plan
from .placement.kinds import Kind
from .placement.row_warnings import RowWatch
from .placement.weighted_loss import reduction_of
from .plan_cache.find import found_or_made
from .plans.plan import Plan
from .progress import Progress
from .runtime.device_graphs import DeviceGraphs, check_graphs
from .runtime.devices import device_of
from .runtime.input_agreement import Agreement
from .runtime.local_rows import check_local
from .runtime.ranks import Ranks
from .runtime.runnable import Runnable
from .runtime.step import BeforeCall, Step
from .runtime.workers import Workers


class Traces(NamedTuple):
    """What a call's plan is made from, beside the request and the schedule's order.

    loss_reduction: the request's, which the trace decides.
    watch: warns of losses and outputs; of one microbatch there is none.
    early: computes inputs that follow those of the call, if there are any.
    """

    stages: StageGraph
    loss_reduction: LossReduction
    watch: RowWatch | None
    early: Early | None


class CallPlan(NamedTuple):
    """A call's plan, and what it was made from.

    request: the backend's, with what this call has decided.
    """

    plan: Plan
    traces: Traces
    request: Request


class TracedCall(NamedTuple):
    """A call's microbatch; see Traced and CallPlan."""

    graph: fx.GraphModule
    early: Early | None
    batch: Batch
    request: Request


def plan_call(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    options: Options,
    workers: Workers | None = None,
) -> CallPlan:
    """Traces a microbatch of the call and plans it, or finds the traces of an earlier
    start.

    workers: that the plan is to run on; None, where it is only looked at.
    """
    batch = batch_of(gm, args, options.request)
    request = _request(args, batch, options, workers)
    with Progress() as progress, no_collection():

        def planned(request: Request) -> CallPlan:
            def make(schedule: Schedule) -> Traces:
                asking = replace(request, schedule=schedule)
                return _traces(gm, args, batch, asking, options, progress)

            own = options.passes or options.model_passes or options.measured is not None
            if own or request.schedule.shards > 1:
                traces = make(request.schedule)
            else:
                more = sorted(specs_of(args).items()), options.stage_compiler, batch
                shapes = options.stage_compiler != "eager"
                traces = found_or_made(gm, args, request, more, make, shapes)
            request = replace(request, loss_reduction=traces.loss_reduction)
            request = _with_parts(args, request, options, traces)
            plan = make_plan(traces.stages, request, tuple(options.passes), progress)
            return CallPlan(plan, traces, request)

        called = plan_within(planned, request)
    if request.rows == "local" and isinstance(workers, Ranks):
        check_local(called.plan, options.request.schedule)
    return called


def _with_parts(
    args: Sequence[Any], request: Request, options: Options, traces: Traces
) -> Request:
    """The request with parts in the place of weights that the optimizer has.

    Raises PlanError for an optimizer that can't step them.
    """
    parts, optimizer = facts(traces.stages.graph).parts, options.optimizer
    if optimizer is None or not parts:
        return request
    cut = {part.input for part in parts.values()} & set(request.updates)
    if request.training:
        check_apart(optimizer, [args[i] for i in sorted(cut)])
    sizes = bytes_of_parts(request.state_bytes, parts)
    return replace(request, updates=in_parts(request.updates, parts), state_bytes=sizes)


def traced_call(
    gm: fx.GraphModule, args: tuple[Any, ...], options: Options
) -> TracedCall:
    """A call's microbatch, with the stages of its nodes, and what it was traced for."""
    batch = batch_of(gm, args, options.request)
    request = _request(args, batch, options, None)
    traced = _traced(gm, args, batch, request, options)
    request = replace(request, loss_reduction=_loss_reduction(traced, request))
    assign_stages(traced.graph, request)
    return TracedCall(traced.graph, traced.early, batch, request)


def _request(
    args: tuple[Any, ...], batch: Batch, options: Options, workers: Workers | None
) -> Request:
    """The backend's request, with what this call decides."""
    request, known = options.request, placed(args) if workers else []
    updaters = {i: each.updater for i, each in known}
    limited = request.memory_limit is not None and torch.is_grad_enabled()
    return replace(
        request,
        carry=request.carry if limited or request.carry != "auto" else "saved",
        updates=positions_of(options.optimizer, args) if options.optimizer else (),
        moments=_moments(args, options),
        state_bytes=state_bytes(options.optimizer, args),
        training=torch.is_grad_enabled(),
        schedule=_with_updates(request.schedule.first(batch.microbatches), options),
        owners={i: record.owners for i, record in known},
        cuts={i: record.parts.place for i, record in known if record.parts},
        updaters={i: u for i, u in updaters.items() if u is not None},
        readers=workers.readers if workers else None,
        **_between(workers, request),
    )


def _between(workers: Workers | None, request: Request) -> dict[str, Any]:
    """How values go between workers, and the hosts of ranks, if the user doesn't say
    them."""
    if not isinstance(workers, Ranks):
        found: dict[str, Any] = {"ordered": workers is not None and workers.ordered}
    else:
        processes = workers.processes
        hosts = request.hosts or processes.hosts
        ordered = processes.groups is not None
        near = processes.near and not ordered
        found = {"hosts": hosts, "gloo": not near, "ordered": ordered}
    if request.sums == "collective" and not found["ordered"]:
        raise PlanError(
            "backend(sums='collective'): only transport='nccl' has one, between GPUs; "
            "leave sums= out"
        )
    return found


def _traced(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    batch: Batch,
    request: Request,
    options: Options,
) -> Traced:
    """A microbatch of the call."""

    once = _updates_once(options.request.schedule)

    def trace(norms: Norms, spread: bool) -> Traced:
        traced = trace_microbatch(
            gm,
            args,
            batch,
            specs_of(args),
            request.loss_reduction == "weighted",
            request.outputs,
            request.loss_reduction == "exact",
            _sees_whole_batch(options.request),
            spread,
            norms,
            once,
            request.device,
        )
        if options.measured is not None:
            options.measured.apply(traced.graph)
        return traced._replace(
            graph=run_model_passes(traced.graph, request, options.model_passes)
        )

    def paired(norms: Norms) -> Traced:
        return trace_pairs(partial(trace, norms), request)

    return trace_norms(paired, request, once)


def _traces(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    batch: Batch,
    request: Request,
    options: Options,
    progress: Progress,
) -> Traces:
    """What a plan is made from, but for the order of jobs."""
    progress.at("trace", 1, PARTS)
    traced = _traced(gm, args, batch, request, options)
    exact = request.loss_reduction == "exact"
    count = len(args)
    if traced.early is not None:
        count += len(result(traced.early.graph))
    request = replace(
        request, loss_reduction=_loss_reduction(traced, request), inputs=count
    )
    stages = cut_stages(traced.graph, request, tuple(options.passes), progress)
    watch = None
    if request.schedule.microbatches > 1:
        loss = facts(stages.graph).loss
        rows, labels = traced.rows, traced.labels
        watch = RowWatch(traced.graph, rows, labels, loss, request, exact)
    return Traces(stages, request.loss_reduction, watch, traced.early)


def _with_updates(schedule: Schedule, options: Options) -> Schedule:
    """The schedule with one update a call, if there is an optimizer and it says no
    other; without any where no gradients are wanted."""
    if not torch.is_grad_enabled():
        return replace(
            schedule,
            update_every=None,
            ahead=0,
            rate=None,
            drift=None,
            average_every=None,
            elastic=None,
            outer=None,
        )
    if options.optimizer is None or schedule.update_every is not None:
        return schedule
    return replace(schedule, update_every=schedule.microbatches)


def _moments(args: Sequence[Any], options: Options) -> dict[int, Specs]:
    """Shapes of what the optimizer keeps of what it has, if that is averaged."""
    averaged = options.request.schedule.average_every is not None
    if options.optimizer is None or not averaged or not torch.is_grad_enabled():
        return {}
    return moment_specs(options.optimizer, args)


def _loss_reduction(traced: Traced, request: Request) -> LossReduction:
    """How the microbatches' losses are put together: "mean" or "sum"."""
    if request.loss_reduction not in ("exact", "weighted"):
        return request.loss_reduction
    pairs = zip(facts(traced.graph).outputs, traced.rows, strict=True)
    losses = [rows for output, rows in pairs if rows and output.kind == "scalar"]
    if request.loss_reduction == "weighted":
        return reduction_of(losses)
    return "sum" if {rows.kind for rows in losses} == {Kind.SUM} else "mean"


def _sees_whole_batch(request: Request) -> bool:
    """Whether each update is of the whole batch, and each rank is handed all of it."""
    return request.rows == "all" and _updates_once(request.schedule)


def _updates_once(schedule: Schedule) -> bool:
    """Whether each update is of the whole batch."""
    parted = schedule.update_every not in (None, schedule.microbatches)
    return not parted and schedule.average_every is None


def make_step(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    options: Options,
    workers: Workers,
) -> Step:
    """Plans and checks a step with the other ranks, and gets its programs ready."""
    refuse_meta(args, "run", "fxsched.plan plans it as it is")
    device = device_of(args)
    if options.capture:
        check_graphs(device)
    if options.request.schedule.update_every and options.optimizer is None:
        raise PlanError(
            "Schedule(update_every=) puts updates into the program; give it the "
            "optimizer, backend(schedule, optimizer=optimizer)"
        )
    number = workers.meet(call_text(gm, args)) if isinstance(workers, Ranks) else 0
    try:
        call_plan = plan_call(gm, args, options, workers)
    except Exception as error:
        if isinstance(workers, Ranks):
            workers.check(error)  # the others wait for this rank
        raise
    plan, traces, request = call_plan
    try:
        workers.check(plan)
    except CheckError as error:
        _note_passes(error, options.passes)
        raise
    with workers.guarded(), no_collection():
        programs = _programs(plan, options, request, workers, device)
    agreement = None
    if isinstance(workers, Ranks):
        inputs = [each for each in plan.inputs if each.input < len(args)]
        local = request.rows == "local"
        agreement = Agreement(options.inputs, inputs, workers.processes, number, local)
    watch = traces.watch if 0 in workers.here else None
    before = BeforeCall(agreement, watch, traces.early)
    scale, record, recorder = options.scale, options.record, options.recorder
    optimizers = _stage_optimizers(call_plan, args, options.optimizer, workers)
    return Step(plan, programs, workers, before, scale, optimizers, record, recorder)


def _stage_optimizers(
    call_plan: CallPlan,
    args: Sequence[Any],
    optimizer: Optimizer | None,
    workers: Workers,
) -> StageOptimizers | None:
    """What steps the weights of a plan's stages here, if it has updates."""
    plan = call_plan.plan
    if optimizer is None or not plan.updates:
        return None
    schedule, here = plan.schedule, set(workers.here)
    every, own = _stepped(plan, range(schedule.workers)), _stepped(plan, here)
    mine = set(map(plan.weight_at, own))
    elsewhere = [args[i] for i in map(plan.weight_at, every) if i not in mine]
    guard(optimizer, elsewhere, own != every)
    corrections = Corrections(schedule, plan.groups)
    if schedule.average_every is not None:
        moments = call_plan.request.moments
        return ReplicaOptimizers(optimizer, plan.groups, corrections, moments, here)
    stale = schedule.version is not None or schedule.drift is not None
    stale |= any(group.unawaited and group.owners[1:] for group in plan.groups)
    shared = len(here) > 1 and stale and not plan.by_arrival
    parts = CallParts(optimizer, plan.parts, own)
    return StageOptimizers(optimizer, plan.groups, shared, corrections, parts)


def _stepped(plan: Plan, workers: Collection[int]) -> list[int]:
    """Positions of what updates on some workers step."""
    return [
        state.input
        for group in plan.groups
        for state in group.learned
        if any(worker in workers for worker in group.updaters)
    ]


def _note_passes(error: CheckError, passes: Sequence[Pass]) -> None:
    """Says of unsound programs that passes of the user's changed them."""
    if passes:
        error.add_note(
            f"fxsched: passes=[{', '.join(map(pass_name, passes))}] changed these "
            "programs; fxsched.plan(model, schedule, *inputs, passes=[...])"
            ".programs[worker].graph shows what they are now; a pass that means to put "
            "another value in the place of one says fxsched.passes.replaces(new, old)"
        )


def _programs(
    plan: Plan,
    options: Options,
    request: Request,
    workers: Workers,
    device: torch.device | None,
) -> dict[int, Runnable]:
    """The programs of the workers here, ready to run."""
    if options.stage_compiler == "inductor":
        inductor.compile_stages([plan.programs[worker] for worker in workers.here])
    order = "static" if plan.schedule.in_order else options.request.order
    return {
        worker: Runnable(
            plan.programs[worker],
            order,
            options.record,
            request.ahead,
            options.recorder is not None,
            request.ordered,
            DeviceGraphs(device) if options.capture and device else None,
        )
        for worker in workers.here
    }
