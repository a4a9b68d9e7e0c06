"""From a call of the compiled function to its plan, and to the step that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.optim import Optimizer

from .autodiff import inductor
from .capture.batch import batch_of
from .capture.graph_inputs import call_text
from .capture.meta_device import refuse_meta
from .capture.trace import Traced, trace_microbatch
from .checker.summary import CheckError
from .ir.facts import facts
from .ir.graphs import Specs
from .ir.request import LossReduction, Request
from .jobs.job import PlanError
from .jobs.schedule import Schedule
from .options import Options
from .pairs import trace_pairs
from .passes.users import Pass, pass_name
from .pipeline import make_plan
from .plans.plan import Plan
from .progress import Progress
from .rows.kinds import Kind
from .rows.row_warnings import RowWatch
from .rows.weighted_loss import reduction_of
from .runtime.input_agreement import Agreement
from .runtime.local_rows import check_local
from .runtime.ranks import Ranks
from .runtime.runnable import Runnable
from .runtime.step import BeforeCall, Step
from .runtime.workers import Workers
from .state.corrections import Corrections
from .state.optimizer_bytes import state_bytes
from .state.optimizers import guard
from .state.ownership import specs_of
from .state.replicas import ReplicaOptimizers, moment_specs
from .state.updates import StageOptimizers, positions_of


class CallPlan(NamedTuple):
    """A call's plan, and the traced microbatch and the request that it was made from.

    request: the backend's, with what this call has decided.
    """

    plan: Plan
    traced: Traced
    request: Request


def plan_call(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    options: Options,
    workers: Workers | None = None,
) -> CallPlan:
    """Traces a microbatch of the call and plans it.

    workers: that the plan is to run on; None, where it is only looked at.
    """
    request = options.request
    batch = batch_of(gm, args, request)

    def trace(spread: bool) -> Traced:
        traced = trace_microbatch(
            gm,
            args,
            batch,
            specs_of(args),
            request.loss_reduction == "weighted",
            request.outputs,
            request.loss_reduction == "exact",
            _sees_whole_batch(request),
            spread,
            request.batch_norm,
        )
        if options.measured is not None:
            options.measured.apply(traced.graph)
        return traced

    request = replace(
        request,
        updates=_updated(args, options),
        moments=_moments(args, options),
        state_bytes=state_bytes(options.optimizer, args),
        training=torch.is_grad_enabled(),
        schedule=_with_updates(request.schedule.first(batch.microbatches), options),
        owners=workers.owners(args) if workers else {},
        updaters=workers.updaters(args) if workers else {},
        readers=workers.readers if workers else None,
    )
    with Progress() as progress:
        progress.at("trace")
        traced = trace_pairs(trace, request)
        request = replace(request, loss_reduction=_loss_reduction(traced, request))
        plan = make_plan(traced.graph, request, options.passes, progress)
    if request.rows == "local" and isinstance(workers, Ranks):
        check_local(plan, options.request.schedule)
    return CallPlan(plan, traced, request)


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
        )
    if options.optimizer is None or schedule.update_every is not None:
        return schedule
    return replace(schedule, update_every=schedule.microbatches)


def _updated(args: Sequence[Any], options: Options) -> tuple[int, ...]:
    """Positions of what the optimizer has."""
    if options.optimizer is None:
        return ()
    return positions_of(options.optimizer, args)


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
    pairs = zip(facts(traced.graph).outputs, traced.rows.outputs, strict=True)
    losses = [rows for output, rows in pairs if rows and output.kind == "scalar"]
    if request.loss_reduction == "weighted":
        return reduction_of(losses)
    return "sum" if {rows.kind for rows in losses} == {Kind.SUM} else "mean"


def _sees_whole_batch(request: Request) -> bool:
    """Whether each update is of the whole batch, and each rank is handed all of it."""
    schedule = request.schedule
    parted = schedule.update_every not in (None, schedule.microbatches)
    return request.rows == "all" and not parted and schedule.average_every is None


def make_step(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    options: Options,
    workers: Workers,
) -> Step:
    """Plans and checks a step with the other ranks, and gets its programs ready."""
    refuse_meta(args, "run", "fxsched.plan plans it as it is")
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
    plan, traced, request = call_plan
    try:
        workers.check(plan)
    except CheckError as error:
        _note_passes(error, options.passes)
        raise
    with workers.guarded():
        programs = _programs(plan, options, workers)
    agreement = watch = None
    if isinstance(workers, Ranks):
        inputs = [each for each in plan.inputs if each.input < len(args)]
        local = request.rows == "local"
        agreement = Agreement(options.inputs, inputs, workers.processes, number, local)
    if plan.schedule.microbatches > 1 and 0 in workers.here:
        exact = options.request.loss_reduction == "exact"
        watch = RowWatch(gm, traced.graph, traced.rows, plan.loss, request, exact)
    before = BeforeCall(agreement, watch, traced.early)
    scale, record, recorder = options.loss_scale, options.record, options.recorder
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
    here = set(workers.here)
    elsewhere = [
        args[state.input]
        for group in plan.groups
        for state, trained in zip(group.state, group.trained, strict=True)
        if trained and here.isdisjoint(group.updaters)
    ]
    guard(optimizer, elsewhere)
    schedule = plan.schedule
    corrections = Corrections(schedule, plan.groups)
    if schedule.average_every is not None:
        moments = call_plan.request.moments
        return ReplicaOptimizers(optimizer, plan.groups, corrections, moments, here)
    stale = schedule.version is not None or schedule.drift is not None
    shared = len(here) > 1 and stale and not plan.by_arrival
    return StageOptimizers(optimizer, plan.groups, shared, corrections)


def _note_passes(error: CheckError, passes: Sequence[Pass]) -> None:
    """Says of unsound programs that passes of the user's changed them."""
    if passes:
        error.add_note(
            f"fxsched: passes=[{', '.join(map(pass_name, passes))}] changed these "
            "programs; fxsched.plan(model, schedule, *inputs, passes=[...])"
            ".programs[worker].graph shows what they are now"
        )


def _programs(plan: Plan, options: Options, workers: Workers) -> dict[int, Runnable]:
    """The programs of the workers here, ready to run."""
    if options.stage_compiler == "inductor":
        inductor.compile_stages([plan.programs[worker] for worker in workers.here])
    order = "static" if plan.schedule.in_order else options.request.order
    prefetch = options.request.prefetch
    return {
        worker: Runnable(
            plan.programs[worker],
            order,
            options.record,
            prefetch,
            options.recorder is not None,
        )
        for worker in workers.here
    }
