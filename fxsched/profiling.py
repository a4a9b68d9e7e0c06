"""Measures a model, for plans by its measured times."""

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
from .dry_run import check_model, no_graph
from .ir.garbage import no_collection
from .ir.generators import kept_generators
from .ir.modes import modes_after_errors
from .jobs.job import Direction, PlanError
from .jobs.schedule import Schedule
from .jobs.user_values import positive
from .options import Options
from .params.record import specs_of
from .params.released import stand_in
from .partition.measure import Profile, measure
from .passes.model_passes import ModelPass, run_model_passes
from .planning import make_step
from .runtime.step import Step
from .runtime.workers import Workers, workers_of
from .transport.world import from_rank_0

STAGES = (8, 1)  # of a profile's steps: the first number that the model can be cut into
FEWEST_STEPS, MOST_STEPS = 4, 10  # of these steps, as many as fit into LONG seconds
LONG = 3.0
WARM = 1  # of them that a profile isn't fitted to


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
    long, if it can't be cut into eight stages. Those steps keep two microbatches in
    flight, as workers of a pipeline do: what F saves has then mostly left the caches
    when B reads it. Needs the memory of one such step.
    batch_dims, model_passes: as for fxsched.backend.

    Pass the result as profile= to fxsched.backend, plan or explain. Under torchrun all
    ranks measure at the same time, and every rank gets the times of rank 0, so that all
    ranks make the same plan. Parameters, buffers and random generators are not changed.
    Raises PlanError for a model that can't be traced.
    """
    check_model("profile", model)
    positive("profile", repeats=repeats, microbatches=microbatches)

    schedule = Schedule(1, microbatches)
    options = Options(schedule, batch_dims=batch_dims, model_passes=model_passes)
    with torch.inference_mode(mode=False), torch.enable_grad():

        def call(backend: Backend) -> None:
            torch.compile(model, backend=backend)(*args, **kwargs)

        return _Profiler(options, call, repeats).profile()


def two_in_flight(s: int, b: int, d: Direction) -> int:
    """F of a microbatch, then B of the one before it."""
    return 2 * b if d is Direction.FORWARD else 2 * b + 3


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
        raise no_graph("profile")

    def plan(self, profile: Profile, stages: int, workers: Workers) -> bool:
        """Plans the steps; False for a model that needs other options, or that can't be
        cut into so many stages."""
        schedule = replace(
            self.options.request.schedule, stages=stages, n=two_in_flight
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
        with torch.no_grad(), no_collection():
            while len(steps) < FEWEST_STEPS or (
                len(steps) < MOST_STEPS and perf_counter() - began < LONG
            ):
                steps.append(_run(step, args))
        del steps[:WARM]
        scaled = step.plan.profile(*steps)  # whose plan may have other nodes
        pairs = (
            (profile.measured, scaled.measured),
            (profile.estimated, scaled.estimated),
        )
        return Profile(
            *({key: new.get(key, own[key]) for key in own} for own, new in pairs)
        )


def _run(step: Step, args: tuple[Any, ...]) -> tuple[Event, ...]:
    """The jobs of a step, whose results nobody takes: in this thread, as on ranks,
    since memory that a thread of its own gets is quicker."""
    (run,) = step.start(step.inputs(args, set()))
    outputs = run.advance()["outputs"]
    if step.plan.trains and step.plan.loss is None:
        given = zip(step.plan.outputs, outputs, strict=True)
        run.advance(
            {
                i: torch.ones_like(value)
                for i, (output, value) in enumerate(given)
                if output.differentiable
            }
        )
    return tuple(run.events)


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


class MicrobatchTraced(Exception):
    """Ends the call of a compiled function once there is a traced microbatch.

    captured: the graph of the call. inputs: stand-ins for those of the call.
    """

    def __init__(
        self, traced: Traced, captured: fx.GraphModule, inputs: Sequence[Any]
    ) -> None:
        self.traced, self.captured, self.inputs = traced, captured, inputs
