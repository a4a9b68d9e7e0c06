"""The torch.compile entry: trace, plan, and run each call of the compiled function."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .autodiff import inductor
from .autodiff.activation_checkpoints import inline_checkpoints
from .capture.batch import Batch, batch_of
from .capture.caller import Dims, parts
from .capture.graph_inputs import call_text
from .capture.meta_device import is_meta
from .capture.outputs import REDUCTIONS
from .capture.refusals import refusal
from .capture.trace import (
    ask_for_symbolic_batch,
    capture,
    configure_dynamo,
    graph_break,
    note_arguments,
    note_origins,
    trace_microbatch,
)
from .clock.event_loop import Event
from .costmodel.measure import Profile, measure
from .ir.loss_scale import Scale, read_scale
from .ir.modes import modes_after_errors
from .ir.request import Request
from .jobs import PlanError, Schedule, is_int, is_number
from .pipeline import make_plan
from .plans.plan import Plan
from .rows.label_watch import Watch
from .rows.weighted_loss import reduction_of
from .runtime.input_agreement import CHECKS, Agreement, InputRule
from .runtime.local_rows import check_local, spread
from .runtime.padding import Padded, check_padded, pad
from .runtime.runs import Runnable
from .runtime.step import Step
from .runtime.workers import Ranks, Threads
from .schedules.arguments import each_one_of, one_of, positive
from .state.kept import KEPT, specs_of, stand_in
from .transport.processes import TRANSPORTS, choose, from_rank_0

PLANS = 64  # that a backend keeps
LOCAL = [
    {"ragged": "error", "input_from": None, "loss": loss} for loss in ("mean", "sum")
]  # what goes with rows="local"
Pass = Callable[[fx.GraphModule, Request], fx.GraphModule]


def backend(
    schedule: Schedule,
    stages: str | Sequence[str] = "auto",
    transport: str | None = None,
    order: str = "static",
    carry: str = "saved",
    loss_reduction: str = "mean",
    stage_compiler: str = "eager",
    passes: Sequence[Pass] = (),
    memory_limit: float | None = None,
    same_stage: Sequence[Sequence[str]] = (),
    profile: Profile | bool | None = None,
    prefetch: int = 1,
    check_inputs: str = "first",
    input_from: int | None = None,
    batch_dims: Dims | None = None,
    ragged: str = "error",
    rows: str = "all",
    buffers: Mapping[str, str] | None = None,
    outputs: Mapping[int | str, str] | None = None,
    timeout: float | None = None,
    loss_scale: object = None,
) -> Backend:
    """A torch.compile backend that runs a model by a schedule.

    schedule: what runs where and in which order; see Schedule.
    stages: "auto", or names of modules, each of which starts a new stage.
    transport: "threads" (workers are threads of this process), "distributed" (one rank
        each; those of one host hand values over through shared memory), "gloo" (ranks,
        and nothing but the process group between them), or None: distributed if a
        process group is up or torchrun started us.
    order: "static" (each worker runs its program as planned; schedules in_order always
        do) or "dynamic" (of the jobs that are ready, the smallest n).
    carry: "saved" (B gets the tensors that F saved) or "recompute" (B gets the stage's
        inputs and runs F again).
    loss_reduction: "mean" or "sum" of the microbatches' losses; or "weighted": eager's
        loss of the whole batch, where that is a sum, a mean, or a weighted mean whose
        weights (ignored labels, masks) depend on inputs alone, and a PlanError else.
    stage_compiler: "eager" or "inductor".
    passes: functions (program, request) -> program, run on each worker's program.
    memory_limit: bytes that stages="auto" may put on a worker: weights, their gradients
        and activations. The optimizer's state and what one job needs come on top.
    same_stage: groups of names of modules, to keep in one stage with all between them.
    profile: True to record when each job runs, as backend.timeline; or what
        fxsched.profile measured, to cut stages by it instead of estimates as well.
    prefetch: for how many jobs ahead a worker asks for weights that others keep; it
        holds those of at most prefetch + 1 jobs at a time.
    check_inputs: which calls ranks compare their inputs at, by checksums: "first" (the
        first three of each plan; in later ones by a few elements of each, which cost
        nothing), "always" or "never". All pass the same whole batch.
    input_from: the rank whose inputs all take, each call; the others pass tensors of
        the same shapes and types.
    batch_dims: where arguments have their samples, by name (x, batch['x']) or position:
        a dimension, which may have a multiple of the samples, each sample's in a row;
        or None for what all microbatches share. All others are cut along dimension 0
        and must have one length there.
    ragged: what becomes of a batch that doesn't divide into the microbatches: "error";
        "fewer", the most microbatches that divide it, of equal size, so that the loss
        stays the mean (a batch of 7 by 4 microbatches is one of 7); or "pad", the last
        sample repeated, for models that return rows and no loss.
    rows: "all", every rank passes whole batches; or "local", each passes those rows
        alone that schedule.local_rows(rank, batch) lists, in that order, and outputs
        come back whole; see LocalSampler. In one process there is no difference.
    buffers: for buffers that F writes, by name, what the values of several workers that
        run the stage's F become: "mean", "sum" (of what each added) or "last" (the last
        microbatch's). Running statistics of BatchNorm and InstanceNorm are averaged,
        counters summed; others need this, or one worker that runs the stage's F.
    outputs: what the microbatches' values of an output without a row for each sample
        become, by its key in what the model returns, its attribute, or its position:
        "mean", "sum", "max", "min" or "last". Beside the loss, each needs it that is
        not the same for all microbatches.
    timeout: seconds that a rank waits for others at most, after which it ends with
        TimeoutError; by default the process group's. After 10 s a line on stderr says
        who waits for whom.
    loss_scale: what the loss's gradient is scaled by where B runs in float16: the
        torch.amp.GradScaler, a number, or a function that returns it, asked in each
        call. backward() then hands over what is scaled so, as scaler.scale(loss) does.

    A compiled function that returns one scalar loss runs F and B in the call, and
    loss.backward() adds the finished gradients. One that doesn't runs F in the call
    and B in backward(). Without gradients F runs alone.
    If one rank fails, or makes other calls than the rest (one that evaluates alone),
    all stop with an error that says so; see Backend.reset.
    Raises PlanError for options that don't exist, and when called for what cannot be
    planned.
    """
    if isinstance(schedule, fx.GraphModule):
        raise PlanError(
            "torch.compile(backend=fxsched.backend) names the function; give what it "
            "makes, torch.compile(model, backend=fxsched.backend(schedule))"
        )
    one_of("backend", "order", order, ("static", "dynamic"))
    one_of("backend", "carry", carry, ("saved", "recompute"))
    one_of("backend", "loss_reduction", loss_reduction, ("mean", "sum", "weighted"))
    one_of("backend", "stage_compiler", stage_compiler, ("eager", "inductor"))
    one_of("backend", "ragged", ragged, ("error", "fewer", "pad"))
    one_of("backend", "rows", rows, ("all", "local"))
    others = {"ragged": ragged, "input_from": input_from, "loss": loss_reduction}
    if rows == "local" and others not in LOCAL:
        raise PlanError(
            "backend(rows='local') doesn't go with ragged=, input_from= or "
            "loss_reduction='weighted', which need the whole batch on every rank"
        )
    one_of("backend", "transport", transport, (None, *TRANSPORTS))
    one_of("backend", "check_inputs", check_inputs, CHECKS)
    if isinstance(stages, str) and stages != "auto":
        raise PlanError(
            f"backend(stages={stages!r}): give 'auto' or a list of module names, such "
            f"as [{stages!r}]"
        )
    if not isinstance(stages, str):
        stages = tuple(stages) if isinstance(stages, Iterable) else (stages,)
        if not stages or not all(isinstance(name, str) for name in stages):
            raise PlanError(
                f"backend(stages={list(stages)!r}): give 'auto' or a list of names of "
                "modules"
            )
    if not isinstance(schedule, Schedule):
        raise PlanError(
            f"backend(schedule={schedule!r}): give a Schedule, such as "
            "fxsched.schedules.gpipe(workers=4, microbatches=8)"
        )
    if not is_int(prefetch) or prefetch < 0:
        raise PlanError(f"backend(prefetch={prefetch!r}): give an int, 0 or more")
    if input_from is not None and (
        not is_int(input_from) or not 0 <= input_from < schedule.workers
    ):
        raise PlanError(
            f"backend(input_from={input_from!r}): give a rank, 0 to "
            f"{schedule.workers - 1}"
        )
    if timeout is not None and not (is_number(timeout) and timeout > 0):
        raise PlanError(f"backend(timeout={timeout!r}): give seconds, above 0")
    if memory_limit is not None and not (is_number(memory_limit) and memory_limit > 0):
        raise PlanError(f"backend(memory_limit={memory_limit!r}): give bytes, above 0")
    if not (profile is None or isinstance(profile, (bool, Profile))):
        raise PlanError(
            f"backend(profile={profile!r}): give True, or what fxsched.profile(model, "
            "*inputs) measured"
        )
    if not isinstance(passes, (tuple, list)) or not all(map(callable, passes)):
        raise PlanError(
            f"backend(passes={passes!r}): give a list of functions (program, request) "
            "-> program"
        )
    groups = _groups(same_stage)
    scale = read_scale(loss_scale)
    configure_dynamo()
    request = Request(
        schedule,
        stages,
        carry,
        loss_reduction,
        memory_limit=memory_limit,
        same_stage=groups,
        prefetch=prefetch,
        batch_dims=_batch_dims(batch_dims),
        ragged=ragged,
        rows=rows,
        most=schedule.microbatches,
        buffers=each_one_of("buffers", buffers, ("mean", "sum", "last")),
        outputs=each_one_of("outputs", outputs, REDUCTIONS),
        scaled=loss_scale is not None,
    )
    rule = InputRule(check_inputs, input_from)
    own = tuple(passes)
    made = Backend(
        request, transport, order, stage_compiler, own, profile, rule, timeout
    )
    made.loss_scale = scale
    return made


def plan(
    model: Callable[..., Any],
    schedule: Schedule,
    *args: Any,
    stages: str | Sequence[str] = "auto",
    carry: str = "saved",
    memory_limit: float | None = None,
    same_stage: Sequence[Sequence[str]] = (),
    profile: Profile | None = None,
    batch_dims: Dims | None = None,
    ragged: str = "error",
    buffers: Mapping[str, str] | None = None,
    outputs: Mapping[int | str, str] | None = None,
    **kwargs: Any,
) -> Plan:
    """The plan of model(*args, **kwargs) by a schedule, without running anything.

    The other options are those of fxsched.backend. One process plans for any number of
    workers. A model and inputs on the meta device, which have no memory, are planned as
    on the CPU. Raises PlanError for what cannot be planned.
    """
    _check_model("plan", model)
    planner = backend(
        schedule,
        stages,
        "threads",
        carry=carry,
        memory_limit=memory_limit,
        same_stage=same_stage,
        profile=profile,
        batch_dims=batch_dims,
        ragged=ragged,
        buffers=buffers,
        outputs=outputs,
    )
    planner.plan_only = True
    try:
        torch.compile(model, backend=planner)(*args, **kwargs)
    except _Planned as planned:
        return planned.plan
    raise _no_graph("plan")


def explain(
    model: Callable[..., Any], schedule: Schedule, *args: Any, **kwargs: Any
) -> str:
    """The stages of a plan, what each costs, and what limits the step, as text.

    Takes what fxsched.plan takes.
    """
    return plan(model, schedule, *args, **kwargs).explain()


def profile(
    model: Callable[..., Any],
    *args: Any,
    microbatches: int = 1,
    repeats: int = 9,
    batch_dims: Dims | None = None,
    **kwargs: Any,
) -> Profile:
    """Measures F and B of every node of model(*args, **kwargs), for one microbatch.

    batch_dims: as for fxsched.backend.

    Give it to fxsched.backend, plan or explain. Under torchrun all ranks measure at the
    same time, and every rank gets what rank 0 measured, so that all plan alike.
    Parameters, buffers and random numbers stay as they are. Raises PlanError for models
    that cannot be traced.
    """
    _check_model("profile", model)
    positive("profile", repeats=repeats, microbatches=microbatches)

    def make() -> Profile:
        way = Schedule(1, microbatches)
        tracer = _Tracer(backend(way, batch_dims=batch_dims).request)
        tracer.plan_only = True
        try:
            with torch.enable_grad():
                torch.compile(model, backend=tracer)(*args, **kwargs)
        except _Traced as traced:
            return measure(traced.graph, traced.inputs, microbatches, repeats)
        raise _no_graph("profile")

    return from_rank_0(make)


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
        wanted = f"{call}(model={model!r}): give an nn.Module or a function of tensors"
    raise PlanError(wanted)


def _groups(same_stage: object) -> tuple[tuple[str, ...], ...]:
    """same_stage as tuples, checked."""
    groups = same_stage if isinstance(same_stage, (list, tuple)) else [same_stage]
    for group in groups:
        if (
            not isinstance(group, (list, tuple))
            or len(group) < 2
            or not all(isinstance(name, str) for name in group)
        ):
            raise PlanError(
                f"backend(same_stage={same_stage!r}): give groups of two or more names "
                "of modules, such as [['encoder.embed', 'head']]"
            )
    return tuple(map(tuple, groups))


def _no_graph(what: str) -> PlanError:
    return PlanError(
        f"Dynamo made no graph of the model, so there is no {what}; "
        "torch.compile(model, fullgraph=True) tells why"
    )


class _Planning(NamedTuple):
    """A plan, and the traced microbatch and the request that it was made from."""

    plan: Plan
    traced: fx.GraphModule
    request: Request


class _Planned(Exception):
    """Ends the call of a compiled function once there is a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


class _Traced(Exception):
    """Ends the call of a compiled function once there is a traced microbatch."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.graph, self.inputs = graph, inputs


class Backend:
    """What fxsched.backend returns; `plan` is there after the first call.

    plan: of the last call with gradients, or, if there was none, without.
    timeline: when each job of that call ran; see there.

    It keeps the plans of its last PLANS kinds of calls (shapes, modes, models), makes
    others anew when they come again, and is a context manager; see close().
    """

    def __init__(
        self,
        request: Request,
        transport: str | None = None,
        order: str = "static",
        stage_compiler: str = "eager",
        passes: tuple[Pass, ...] = (),
        profile: Profile | bool | None = None,
        rule: InputRule | None = None,
        timeout: float | None = None,
    ) -> None:
        self._rule = rule or InputRule()
        self.request, self.order, self.passes = request, order, passes
        self.stage_compiler, self.record = stage_compiler, bool(profile)
        self.profile = None if isinstance(profile, bool) else profile
        self._last: Step | None = None
        self.plan: Plan | None = None
        self.plan_only = False
        self._transport, self._timeout = transport, timeout
        self._workers: Threads | Ranks | None = None
        self.closed = False
        self._events: tuple[Event, ...] | None = None  # once it is closed
        self._served: weakref.WeakSet[Any] = weakref.WeakSet()
        self._steps: dict[str, Step] = {}  # the last one to be called is the last
        self._said: set[str] = set()  # what was warned of
        self.on_trace: Callable[..., None] | None = None  # for fxsched.verify
        self.loss_scale: Scale | None = None

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends threads, links and process groups, and lets go of all plans but `plan`.

        Every rank calls it. A compiled function that is called after that raises
        PlanError. Without it, plans and threads go with the last function that was
        compiled with this backend, and ranks' links and groups with the backend, which
        torch.compile's caches keep until torch._dynamo.reset().
        """
        self.closed = True
        self._rest()
        if self._workers is not None:
            self._workers.close()

    def serve(self, function: object) -> None:
        """Notes what lives as long as a function compiled with this backend."""
        if function not in self._served:
            self._served.add(function)
            weakref.finalize(function, _leave, weakref.ref(self)).atexit = False

    def leave(self) -> None:
        """Lets go of plans and threads if no compiled function is there to use them.

        Not of ranks' links: whether another one comes, all ranks must say together.
        """
        if not any(True for _ in self._served) and not isinstance(self._workers, Ranks):
            self._rest()
            self._workers = None

    def _rest(self) -> None:
        self._steps.clear()
        if self._last is not None:
            self._events, self._last = self._last.events, None

    def __call__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Sequence[Any]]:
        """torch.compile's side: from a traced graph to a function of its inputs."""
        broken = graph_break(gm) or refusal(gm) or _not_ours(options)
        gm = inline_checkpoints(gm)
        note_origins(gm, inputs)
        note_arguments(gm, inputs)
        if broken is None and self.request.schedule.microbatches > 1:
            ask_for_symbolic_batch(gm, inputs, self.request)
        captured = capture(gm, inputs)

        def call(*args: Any) -> Sequence[Any]:
            if broken is not None:
                raise broken
            return self._run(captured, args)

        return call

    def __deepcopy__(self, memo: object) -> Backend:
        """Itself: the copy of a compiled model has weights of its own, not workers."""
        return self

    def _sized(
        self, gm: fx.GraphModule, args: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Padded | None]:
        """The arguments with the rows of all ranks, if this one passes its own, or with
        a batch that divides, if it is to be filled up."""
        request = self.request
        if request.rows == "local" and isinstance(self._workers, Ranks):
            return spread(gm, args, request, self._workers.rank), None
        padded = pad(gm, args, request) if request.ragged == "pad" else None
        return (args if padded is None else padded.args), padded

    def _run(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> Sequence[Any]:
        if self.closed:
            raise PlanError(
                "this backend is closed; compile the model with a new one, "
                "torch.compile(model, backend=fxsched.backend(schedule))"
            )
        if not self.plan_only:
            self._all()
        if isinstance(self._workers, Ranks):
            self._workers.call()
        args, padded = self._sized(gm, args)
        try:
            step = self._step(gm, args)
        except _Planned as planned:
            if padded is not None:
                check_padded(gm, planned.plan)
            raise
        if padded is not None:
            check_padded(gm, step.plan)
        if self._last is None or step.plan.trains or not self._last.plan.trains:
            self._last, self.plan = step, step.plan
        given = args if step.agreement is None else step.agreement(args)
        with step.workers.guarded():
            if step.watch is not None:
                step.watch(given, self._said)
            if step.early is not None:
                given = (*given, *step.early(*given))
        outputs = step(args, given)
        for output, value in zip(step.plan.outputs, outputs, strict=True):
            old = args[output.state or 0] if output.replaced else None
            if isinstance(old, Tensor) and old in KEPT:
                KEPT[value] = KEPT[old]
        return outputs if padded is None else padded.trimmed(outputs, step.plan)

    def _step(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> Step:
        """The step for these inputs, planned now if there is none yet."""
        key = _key(gm, args)
        step = self._planned(key, gm, args)
        ranks = self._workers
        if isinstance(ranks, Ranks) and not ranks.settle(step.plan, args):
            # another model of the class, whose weights an earlier plan put elsewhere
            step = self._planned(f"{key}\n{ranks.owners(args)}", gm, args)
            assert ranks.settle(step.plan, args), "owners were planned for"
        return step

    def _planned(self, key: str, gm: fx.GraphModule, args: tuple[Any, ...]) -> Step:
        """The step of this key, planned now unless it is one of the last PLANS."""
        with modes_after_errors():
            step = self._steps.pop(key, None) or self._make(gm, args)
        self._steps[key] = step
        if len(self._steps) > PLANS:  # by the order of calls: on all ranks the same
            del self._steps[next(iter(self._steps))]
        return step

    def reset(self, loaded: bool = False) -> None:
        """Brings ranks together again after one has failed; every rank calls it.

        loaded: whether all ranks have the same parameters, buffers and optimizer state,
            such as a checkpoint's, though some had finished more calls than others.
        Raises PlanError if they had, unless loaded; TimeoutError if not all ranks call
        it within the timeout. Threads are always together.
        """
        if isinstance(self._workers, Ranks):
            self._workers.reset(loaded)
            for step in self._steps.values():
                step.apart = None  # they may have drawn more numbers than others
                if step.agreement is not None:
                    step.agreement.calls = 0

    def _all(self) -> Threads | Ranks:
        """The workers, started with the first call."""
        if self._workers is None:
            workers = self.request.schedule.workers
            kind = choose(self._transport, workers)
            if kind == "threads":
                self._workers = Threads(workers)
                return self._workers
            near = kind == "distributed"
            self._workers = Ranks(workers, near, self._timeout)
            end = weakref.finalize(self, self._workers.close)
            end.atexit = False  # threads end with their pool
        return self._workers

    def _make(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> Step:
        """Plans and checks a step with the other ranks, and gets its programs ready."""
        if not self.plan_only:
            _refuse_meta(args, "run", "fxsched.plan plans it as it is")
        workers, number = self._workers, 0
        if isinstance(workers, Ranks):
            number = workers.meet(call_text(gm, args))
        try:
            plan, traced, request = self._plan(gm, args)
        except Exception as error:
            if isinstance(workers, Ranks):
                workers.check(error)  # the others wait for this rank
            raise
        if workers is None:
            raise _Planned(plan)
        workers.check(plan)
        order = "static" if plan.schedule.in_order else self.order
        here, prefetch = workers.here, self.request.prefetch
        with workers.guarded():
            if self.stage_compiler == "inductor":
                inductor.compile_stages([plan.programs[r] for r in here])
            programs = {
                r: Runnable(plan.programs[r], order, self.record, prefetch)
                for r in here
            }
        step = Step(plan, programs, workers, self.record)
        step.early, step.scale = traced.meta["early"], self.loss_scale
        if isinstance(workers, Ranks):
            own = [each for each in plan.inputs if each.input < len(args)]
            local = request.rows == "local"
            step.agreement = Agreement(
                self._rule, own, workers.processes, number, local
            )
        if plan.schedule.microbatches > 1 and 0 in here:
            step.watch = Watch(gm, traced, plan.loss, request)
        return step

    def _plan(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> _Planning:
        owners = self._workers.owners(args) if self._workers else {}
        batch = batch_of(gm, args, self.request)
        traced = self._trace(gm, args, batch)
        if self.profile is not None:
            self.profile.apply(traced)
        request = dataclasses.replace(
            self.request,
            loss_reduction=self._reduction(traced),
            training=torch.is_grad_enabled(),
            schedule=self.request.schedule.first(batch.microbatches),
            owners=owners,
            readers=self._workers.readers if self._workers else None,
        )
        plan = make_plan(traced, request, self.passes)
        if request.rows == "local" and isinstance(self._workers, Ranks):
            check_local(plan, self.request.schedule)
        return _Planning(plan, traced, request)

    def _trace(
        self, gm: fx.GraphModule, args: tuple[Any, ...], batch: Batch
    ) -> fx.GraphModule:
        """The graph of one microbatch."""
        weighted = self.request.loss_reduction == "weighted"
        specs, said = specs_of(args), self.request.outputs
        traced = trace_microbatch(gm, args, batch, specs, weighted, said)
        if self.on_trace is not None:
            self.on_trace(gm, args, batch, traced)
        return traced

    def _reduction(self, traced: fx.GraphModule) -> str:
        """How the microbatches' losses are put together: "mean" or "sum"."""
        reduction = self.request.loss_reduction
        if reduction != "weighted":
            return reduction
        pairs = zip(traced.meta["outputs"], traced.meta["rows"], strict=True)
        return reduction_of([rows for output, rows in pairs if output.kind == "scalar"])

    @property
    def timeline(self) -> tuple[Event, ...]:
        """The jobs of the call that `plan` is of, of all workers, in the order of their
        starts; seconds from the start of the call.

        Raises PlanError without backend(profile=True), and before the first call.
        """
        if not self.record:
            raise PlanError("there is no timeline; use backend(schedule, profile=True)")
        if self._last is None and self._events is None:
            raise PlanError("there is no timeline before the first call")
        return self._events or () if self._last is None else self._last.events


def _not_ours(options: dict[str, Any]) -> PlanError | None:
    """The error for what torch.compile was given besides the backend, if anything."""
    if not options:
        return None
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return PlanError(
        f"torch.compile({given}) is for Inductor; leave it out, or take "
        "fxsched.backend(schedule, stage_compiler='inductor') to compile stages with it"
    )


def _leave(backend: weakref.ref[Backend]) -> None:
    left = backend()
    if left is not None:
        left.leave()


class _Tracer(Backend):
    """A backend that stops at the traced microbatch."""

    def _make(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> Step:
        _refuse_meta(args, "be measured", "fxsched.plan estimates what it takes")
        batch = batch_of(gm, args, self.request)
        traced = trace_microbatch(gm, args, batch, specs_of(args))
        raise _Traced(traced, [stand_in(value) for value in args])


def _batch_dims(dims: object) -> dict[str | int, int | None]:
    """backend(batch_dims=), checked."""
    if dims is None:
        return {}
    if not isinstance(dims, Mapping):
        raise PlanError(
            f"backend(batch_dims={dims!r}): give a dict, such as "
            '{"cand": 0, "x": 1, "scale": None}'
        )
    for key, dim in dims.items():
        if not (parts(key) if isinstance(key, str) else is_int(key)):
            raise PlanError(
                f"backend(batch_dims={{{key!r}: ..}}): name an argument, or give its "
                "position"
            )
        if dim is not None and not is_int(dim):
            raise PlanError(
                f"backend(batch_dims={{{key!r}: {dim!r}}}): give a dimension, or None "
                "for what all microbatches share"
            )
    return {
        key if isinstance(key, str) else int(key): None if dim is None else int(dim)
        for key, dim in dims.items()
    }


def _refuse_meta(args: Sequence[Any], what: str, instead: str) -> None:
    if is_meta(args):
        raise PlanError(
            f"the model or its inputs are on the meta device and have no values to "
            f"{what} with; {instead}, and model.to_empty(device=...) gives it memory"
        )


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of an input; those of a parameter change when a rank gives it up."""
    return () if isinstance(tensor, torch.nn.Parameter) else tuple(tensor.stride())


def _key(gm: fx.GraphModule, args: Sequence[Any]) -> str:
    """Equal for calls that one step serves: same graph, shapes and modes."""
    shapes = [
        (tuple(a.shape), _strides(a), a.dtype, a.device, a.requires_grad)
        if isinstance(a, Tensor)
        else a
        for a in args
    ]
    ids = [id(a) for a in args if isinstance(a, Tensor)]
    same = list(map(ids.index, ids)) if len(set(ids)) < len(ids) else ""
    casts = [
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
    return f"{gm.meta['text']}\n{shapes}{same}\n{torch.is_grad_enabled()} {casts}"
