"""Plans and profiles a model without training it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx

from .backend import Backend
from .capture.batch import batch_of
from .capture.caller import Dims
from .capture.meta_device import refuse_meta
from .capture.trace import Traced, trace_microbatch
from .clock.timeline import Event
from .ir.generators import kept_generators
from .ir.modes import modes_after_errors
from .jobs.job import PlanError
from .jobs.schedule import Schedule
from .jobs.user_values import positive, shown
from .options import PLANNED, Options, named_in_errors, parted, with_names
from .params.record import specs_of
from .params.released import stand_in
from .partition.measure import Profile, measure
from .passes.model_passes import ModelPass, run_model_passes
from .planning import make_step, plan_call
from .plans.plan import Plan
from .runtime.padding import check_padded
from .runtime.step import Step
from .runtime.workers import Workers, workers_of
from .schedules.orders import microbatch_first
from .transport.world import from_rank_0

STAGES = (8, 1)  # of a profile's steps: the first number that the model can be cut into
FEWEST_STEPS, MOST_STEPS = 4, 10  # of these steps, as many as fit into LONG seconds
LONG = 3.0
WARM = 1  # of them that a profile isn't fitted to


def plan(
    model: Callable[..., Any], schedule: Schedule, *args: Any, **kwargs: Any
) -> Plan:
    """Plans model(*args, **kwargs) by a schedule, without running anything.

    Keyword arguments may be options of fxsched.backend that a plan depends on; all
    others are passed to the model. One process plans for any number of workers. A model
    and inputs on the meta device, which has no memory, are planned as on the CPU,
    with the costs of device= if it is given.
    Raises PlanError for a model or schedule that can't be planned.
    """
    return Planner(model, *args, **kwargs).plan(schedule)


plan.__signature__ = with_names(plan, PLANNED)  # type: ignore[attr-defined]


class Planner:
    """Plans model(*args, **kwargs) by any schedules, as plan does; Dynamo traces the
    call once."""

    def __init__(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        _check_model("plan", model)
        self.model, self.args = model, args
        self.own, self.kwargs = parted("plan", model, PLANNED, kwargs)
        self._compiled: dict[bool, tuple[_PlanOnly, Callable[..., Any]]] = {}

    def plan(self, schedule: Schedule, **own: Any) -> Plan:
        """The plan by a schedule. own: options for this plan alone, but for those that
        tracing reads, such as batch_dims."""
        with named_in_errors("plan"):
            options = Options(schedule, **self.own | own, transport="threads")
        cut = schedule.microbatches > 1  # else torch.export leaves no batch to cut
        if cut not in self._compiled:
            backend = _PlanOnly(options)
            compiled = torch.compile(self.model, backend=backend)
            self._compiled[cut] = backend, compiled
        backend, compiled = self._compiled[cut]
        backend.options, backend.request = options, options.request
        try:
            compiled(*self.args, **self.kwargs)
        except _Planned as planned:
            return planned.plan
        except PlanError:
            del self._compiled[cut]  # it may be traced otherwise by now
            raise
        raise _no_graph("plan")


def explain(
    model: Callable[..., Any], schedule: Schedule, *args: Any, **kwargs: Any
) -> str:
    """Describes the stages of a plan, their costs, and what limits the step, as text.

    Takes the arguments of fxsched.plan.
    """
    return plan(model, schedule, *args, **kwargs).explain()


def profile(
    model: Callable[..., Any],
    *args: Any,
    microbatches: int = 1,
    repeats: int = 9,
    batch_dims: Dims | None = None,
    model_passes: Sequence[ModelPass] = (),
    **kwargs: Any,
) -> Profile:
    """Measures F and B of every node of model(*args, **kwargs), for one microbatch.

    The times of nodes are scaled so that F and B of eight stages take as long as in
    steps of one worker, if fxsched.backend can run the model by Schedule(1,
    microbatches) and these options alone; so that F and B of all of a model take as
    long, if it can't be cut into eight stages. Needs the memory of one such step.
    batch_dims, model_passes: as for fxsched.backend.

    Pass the result as profile= to fxsched.backend, plan or explain. Under torchrun all
    ranks measure at the same time, and every rank gets the times of rank 0, so that all
    ranks make the same plan. Parameters, buffers and random generators are not changed.
    Raises PlanError for a model that can't be traced.
    """
    _check_model("profile", model)
    positive("profile", repeats=repeats, microbatches=microbatches)

    schedule = Schedule(1, microbatches)
    options = Options(schedule, batch_dims=batch_dims, model_passes=model_passes)
    with torch.inference_mode(mode=False), torch.enable_grad():

        def call(backend: Backend) -> None:
            torch.compile(model, backend=backend)(*args, **kwargs)

        return _Profiler(options, call, repeats).profile()


class _Profiler:
    """Measures a call of a model, a node at a time and then in steps of one worker.

    All ranks begin nodes(), plan() and fitted() together: while all cores of a machine
    are busy, as in training, each core is slower.

    captured, inputs: what Dynamo made of the call. step: of one worker.
    """

    captured: fx.GraphModule
    inputs: Sequence[Any] = ()
    step: Step

    def __init__(
        self, options: Options, call: Callable[[Backend], None], repeats: int
    ) -> None:
        self.options, self.call, self.repeats = options, call, repeats

    def profile(self) -> Profile:
        """The times of nodes, scaled to those steps unless the model needs other
        options for them."""
        found = from_rank_0(self.nodes)
        with (
            kept_generators(self.inputs),
            closing(workers_of("threads", 1, None)) as workers,
        ):
            for stages in STAGES:
                if from_rank_0(partial(self.plan, found, stages, workers)):
                    return from_rank_0(partial(self.fitted, found))
        return found

    def nodes(self) -> Profile:
        """The times of nodes, each on its own."""
        try:
            self.call(Tracer(self.options))
        except MicrobatchTraced as end:
            self.captured, self.inputs = end.captured, end.inputs
            with kept_generators(self.inputs):
                count = self.options.request.schedule.microbatches
                return measure(end.traced.graph, self.inputs, count, self.repeats)
        raise _no_graph("profile")

    def plan(self, profile: Profile, stages: int, workers: Workers) -> bool:
        """Plans the steps; False for a model that needs other options, or that can't be
        cut into so many stages."""
        schedule = replace(
            self.options.request.schedule, stages=stages, n=microbatch_first
        )
        options = replace(self.options, schedule=schedule, profile=profile)
        with suppress(PlanError):
            self.step = make_step(self.captured, self._args(), options, workers)
            return True
        return False

    def _args(self) -> tuple[Any, ...]:
        """The inputs without what is known of where ranks keep them."""
        return tuple(
            value.detach().requires_grad_(value.requires_grad)
            if isinstance(value, Tensor)
            else value
            for value in self.inputs
        )

    def fitted(self, profile: Profile) -> Profile:
        """The profile, scaled to steps."""
        step, args, steps = self.step, self._args(), list[tuple[Event, ...]]()
        began = perf_counter()
        with torch.no_grad():
            while len(steps) < FEWEST_STEPS or (
                len(steps) < MOST_STEPS and perf_counter() - began < LONG
            ):
                _run(step, args)
                steps.append(step.events)
        del steps[:WARM]
        scaled = step.plan.profile(*steps)  # without nodes that the plan has otherwise
        return Profile(
            profile.measured | scaled.measured, profile.estimated | scaled.estimated
        )


def _run(step: Step, args: tuple[Any, ...]) -> None:
    """F and B of a step, whose results nobody takes."""
    runs = step.start(step.inputs(args, set()))
    outputs = step.advance(runs, None)["outputs"]
    if step.plan.trains and step.plan.loss is None:
        given = zip(step.plan.outputs, outputs, strict=True)
        ones = {
            i: torch.ones_like(value)
            for i, (output, value) in enumerate(given)
            if output.differentiable
        }
        step.advance(runs, ones)


def _check_model(call: str, model: object) -> None:
    """Raises PlanError for what torch.compile would stumble over, or change for good:
    compiling a class compiles all its instances."""
    if isinstance(model, Schedule):
        wanted = f"{call}(model, ...): the model comes first, here is a Schedule"
    elif isinstance(model, type):
        wanted = (
            f"{call}(model={model.__name__}): give a model, {model.__name__}(...), not "
            "its class"
        )
    elif callable(model):
        return
    else:
        given = f"{call}(model={shown(model)})"
        wanted = f"{given}: give an nn.Module or a function of tensors"
    raise PlanError(wanted)


def _no_graph(what: str) -> PlanError:
    return PlanError(
        f"Dynamo made no graph of the model, so there is no {what}; "
        "torch.compile(model, fullgraph=True) tells why"
    )


class _Planned(Exception):
    """Ends the call of a compiled function once there is a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


class MicrobatchTraced(Exception):
    """Ends the call of a compiled function once there is a traced microbatch.

    captured: the graph of the call. inputs: stand-ins for those of the call.
    """

    def __init__(
        self, traced: Traced, captured: fx.GraphModule, inputs: Sequence[Any]
    ) -> None:
        self.traced, self.captured, self.inputs = traced, captured, inputs


class _PlanOnly(Backend):
    """A backend that stops at the plan."""

    def run(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> Sequence[Any]:
        args, padded = self.sized(gm, args)
        with modes_after_errors():
            plan = plan_call(gm, args, self.options).plan
        if padded is not None:
            check_padded(gm, plan)
        raise _Planned(plan)


class Tracer(Backend):
    """A backend that stops at the traced microbatch."""

    def run(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> Sequence[Any]:
        """Traces a call's microbatch; raises MicrobatchTraced with it."""
        refuse_meta(args, "be measured", "fxsched.plan estimates what it takes")
        with modes_after_errors():
            batch = batch_of(gm, args, self.request)
            exact = self.request.loss_reduction == "exact"
            traced = trace_microbatch(
                gm, args, batch, specs_of(args), exact=exact, by_weight=False
            )
            passes = self.options.model_passes
            traced = traced._replace(
                graph=run_model_passes(traced.graph, self.request, passes)
            )
        raise MicrobatchTraced(traced, gm, [stand_in(value) for value in args])
