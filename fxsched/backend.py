"""The torch.compile entry: trace, plan, and run each call of the compiled function."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from .autodiff.activation_checkpoints import inline_bodies
from .capture.batch import fixed_size
from .capture.caller import Dims
from .capture.dynamo import (
    configure_dynamo,
    note_call,
)
from .capture.functional import early_writes
from .capture.graph_breaks import GraphBreak, left_to_python
from .capture.graph_inputs import placeholders
from .capture.lowered import aten_graph
from .capture.picked_rows import cut_outputs
from .clock.timeline import Event
from .costmodel.measure import Profile
from .ir.loss_scale import read_scale
from .ir.modes import modes_after_errors
from .ir.request import (
    BatchNorm,
    BufferReduction,
    Carry,
    CheckInputs,
    CutWord,
    LossReduction,
    Order,
    OutputReduction,
    Pairs,
    PassedRows,
    Ragged,
    Request,
    StageCompiler,
    Transport,
)
from .jobs.job import Job, PlanError
from .jobs.schedule import Schedule
from .options import (
    Options,
    above_zero,
    check_deterministic,
    check_local_rows,
    check_shards,
    check_updates,
    check_words,
    checked_passes,
    checked_schedule,
    compile_options_error,
    cut_words,
    flag,
    flight_recorder,
    look_ahead,
    measured_profile,
    message_type,
    reductions,
    sample_dims,
    source_rank,
    stage_groups,
    stage_names,
    sum_type,
    uncalled,
)
from .passes.model_passes import ModelPass
from .passes.users import Pass
from .planning import make_step
from .plans.metrics import Metrics, metrics_of
from .plans.plan import Plan
from .progress import tell
from .route import Route
from .runtime.autograd_call import call_step
from .runtime.input_agreement import InputRule
from .runtime.local_rows import spread_rows
from .runtime.padding import Padded, check_padded, pad
from .runtime.ranks import Ranks
from .runtime.step import Step
from .runtime.step_key import step_key
from .runtime.workers import Workers, workers_of
from .state.cuts import hidden_gradients
from .state.ownership import OWNERSHIPS, is_given_up
from .state.updates import checked_optimizer
from .transport.wrappers import refuse_outer_ddp, refuse_wrappers

PLANS = 64  # that a backend keeps


def backend(
    schedule: Schedule,
    stages: str | Sequence[str] = "auto",
    transport: Transport | None = None,
    order: Order = "static",
    carry: Carry = "saved",
    loss_reduction: LossReduction = "exact",
    stage_compiler: StageCompiler = "eager",
    passes: Sequence[Pass] = (),
    memory_limit: float | None = None,
    same_stage: Sequence[Sequence[str]] = (),
    profile: Profile | bool | None = None,
    prefetch: int = 1,
    check_inputs: CheckInputs = "first",
    input_from: int | None = None,
    batch_dims: Dims | None = None,
    ragged: Ragged = "error",
    rows: PassedRows = "all",
    buffers: Mapping[str, BufferReduction] | None = None,
    outputs: Mapping[int | str, OutputReduction] | None = None,
    timeout: float | None = None,
    loss_scale: object = None,
    optimizer: Optimizer | None = None,
    clip_grad_norm: float | None = None,
    skip_nonfinite: bool = False,
    pairs: Pairs = "auto",
    batch_norm: BatchNorm | None = None,
    flight_record: str | PathLike[str] | None = None,
    deterministic: bool = False,
    check_finite: bool = False,
    gradient_dtype: torch.dtype | None = None,
    message_dtype: torch.dtype | None = None,
    shards: Literal["auto"] | Mapping[str, CutWord] = "auto",
    model_passes: Sequence[ModelPass] = (),
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
    loss_reduction: "exact" (eager's loss and outputs of the whole batch: means, sums
        and weights that inputs decide of microbatches, and what rows of the batch meet
        in once, in a joint stage); "mean" or "sum" of the microbatches' losses; or
        "weighted": exact without joint stages, where the loss is a sum, a mean, or a
        mean whose weights (ignored labels, masks) depend on inputs alone, and a
        PlanError else.
    pairs: where rows of the batch meet in pairs, as in CLIP's logits: "joint", all of
        them in one joint stage; "spread", where it can be, each microbatch computes its
        own rows of them, of its own embeddings and those of all, gathered; "auto",
        whichever the schedule's step should be shorter with.
    batch_norm: what BatchNorm takes its statistics of in training: the whole "batch",
        as eager does, in joint stages, or each "microbatch". None: the whole batch,
        where each update and the loss are of it (loss_reduction="exact"), and each
        microbatch else. Plan.explain() says what it costs.
    stage_compiler: "eager" or "inductor".
    passes: functions (program, request) -> program, run on each worker's program
        before its frees are put in; see fxsched.passes.
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
    buffers: for buffers that F writes microbatch after microbatch (updates within a
        call, or a loss_reduction that isn't "exact"), by name, what the values of
        several workers that run the stage's F become: "mean", "sum" (of what each
        added) or "last" (the last microbatch's). Running statistics are averaged,
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

    optimizer: the torch.optim.Optimizer that the program steps: loss = step(x) trains,
        without backward() and step(); each call is one step, or as many as
        schedule.update_every makes. The model returns one scalar loss. Learning rates
        and the like may change between calls; evaluate under torch.no_grad().
    clip_grad_norm: with optimizer=, the largest norm of all gradients; larger ones are
        scaled down as torch.nn.utils.clip_grad_norm_ does it, to the same bits under
        every schedule.
    skip_nonfinite: with optimizer=, whether updates are skipped where that norm is not
        finite.

    flight_record: a folder, this backend's own, for the jobs and messages of the last
        3 calls: when one fails, each rank writes them to a file there, which `fxsched
        blame FOLDER` reads. What an earlier start left there is moved to its folder
        "earlier".

    deterministic: whether gradients have the same bits under every schedule: those of
        one process that runs the microbatches one after another and accumulates. Sums
        over microbatches are made in their order, on one worker, which gets each
        microbatch's gradient of weights that several give. What can't be so is a
        PlanError. On a GPU operations may differ from call to call unless
        torch.use_deterministic_algorithms(True) says otherwise.
    check_finite: whether each job looks at what it made (values that have a gradient,
        gradients, weights after an update in the program) before it hands it on. The
        first NaN or Inf is a FloatingPointError on every rank, with the job and the
        operation's module and line. On a GPU each look waits for the job.
    gradient_dtype: what gradients of parameters are added up in, over microbatches and
        workers, such as torch.float32 for bfloat16 parameters; the finished sum is cast
        once, to the parameter's type, which .grad and the optimizer have. None for the
        parameter's type in sums, too.
    message_dtype: the type (torch.bfloat16, or torch.float16, which overflows above
        65504) that activations and their gradients have on their way to jobs of other
        workers. One that travels is cast where it is made and cast back, and all of
        its readers see that, also those of its own worker. As they are travel integers
        and bools, numbers (0-d), what takes no more bytes, what the model returns, what
        F saves for its B, weights, buffers, and gradients of weights, of which all
        owners keep the same bits. What is rounded depends on the schedule, so it does
        not go with deterministic=True.

    shards: which weights are cut, where the schedule has shards (schedules.sharded):
        "auto" (all that can be, such that the shards exchange nothing but sums), or a
        dict of patterns of names of modules, such as {"blocks.*.attention.query":
        "column", "blocks.*.attention.out": "row"}: "column" cuts what the weight makes,
        "row" what it sums over, as torch.distributed.tensor.parallel's styles do;
        "sequence" are norms and dropout that each shard does for a slice of the rows;
        "expert" cuts a stack [experts, .., ..] into whole experts.
    model_passes: functions (gm, request) -> gm that change the model's graph of one
        microbatch before it is cut into stages; see docs/passes.md.

    A compiled function that returns one scalar loss runs F and B in the call, and
    loss.backward() adds the finished gradients. One that doesn't runs F in the call
    and B in backward(). Without gradients F runs alone.
    If one rank fails, or makes other calls than the rest (one that evaluates alone),
    all stop with an error that says so; see Backend.reset.
    Raises PlanError for options that don't exist, and when called for what cannot be
    planned.
    """
    if isinstance(schedule, fx.GraphModule):
        return uncalled  # type: ignore[return-value]  # to torch.compile, not to users
    checked_schedule(schedule)
    check_words(order=order, carry=carry, loss_reduction=loss_reduction)
    check_words(stage_compiler=stage_compiler, ragged=ragged, rows=rows)
    check_local_rows(rows, ragged, input_from, loss_reduction)
    check_words(transport=transport, check_inputs=check_inputs, pairs=pairs)
    check_words(batch_norm=batch_norm)
    if batch_norm == "batch" and loss_reduction != "exact":
        raise PlanError(
            'batch_norm="batch" runs BatchNorm in joint stages, which come with '
            f'loss_reduction="exact", not "{loss_reduction}"; leave one of them out'
        )
    request = Request(
        schedule,
        stage_names(stages),
        carry,
        loss_reduction,
        memory_limit=above_zero("memory_limit", memory_limit, "bytes"),
        same_stage=stage_groups(same_stage),
        prefetch=look_ahead(prefetch),
        batch_dims=sample_dims(batch_dims),
        ragged=ragged,
        rows=rows,
        most=schedule.microbatches,
        buffers=reductions("buffers", buffers, get_args(BufferReduction)),
        outputs=reductions("outputs", outputs, get_args(OutputReduction)),
        scaled=loss_scale is not None,
        pairs=pairs,
        batch_norm=batch_norm,
        clip_grad_norm=above_zero("clip_grad_norm", clip_grad_norm, "a norm"),
        skip_nonfinite=skip_nonfinite,
        order=order,
        deterministic=flag("deterministic", deterministic),
        check_finite=flag("check_finite", check_finite),
        gradient_dtype=sum_type(gradient_dtype),
        message_dtype=message_type(message_dtype),
        shards=cut_words(shards, schedule),
    )
    check_shards(request)
    check_updates(request, optimizer)
    check_deterministic(request, stage_compiler)
    return Backend(
        Options(
            request,
            transport,
            stage_compiler,
            checked_passes(passes),
            measured_profile(profile),
            bool(profile),
            InputRule(check_inputs, source_rank(input_from, schedule.workers)),
            above_zero("timeout", timeout, "seconds"),
            read_scale(loss_scale),
            checked_optimizer(optimizer),
            flight_recorder(flight_record),
            checked_passes(model_passes, "model_passes"),
        )
    )


class Backend:
    """What fxsched.backend returns; `plan` is there after the first call.

    plan: of the last call with gradients, or, if there was none, without.
    timeline: when each job of that call ran; see there.
    metrics: figures of the last steps; see there.

    It keeps the plans of its last PLANS kinds of calls (shapes, modes, models), makes
    others anew when they come again, and is a context manager; see close().
    """

    def __init__(self, options: Options) -> None:
        self.options, self.request = options, options.request
        self.plan: Plan | None = None
        self.closed = False
        self._last: Step | None = None
        self._workers: Workers | None = None
        self._events: list[tuple[Event, ...]] | None = None  # once it is closed
        self._arrivals: tuple[Job, ...] = ()  # then too
        self._served: weakref.WeakSet[Any] = weakref.WeakSet()
        self._steps: dict[str, Step] = {}  # the last one to be called is the last
        self._said: set[str] = set()  # what was warned of
        configure_dynamo()

    def __enter__(self) -> Backend:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        if error is not None:
            self._write(error)
        self.close()

    def close(self) -> None:
        """Ends threads, links and process groups, and lets go of all plans but `plan`.

        Every rank calls it. A compiled function that is called after that raises
        PlanError. Without it, plans and threads go with the last function that was
        compiled with this backend, and ranks' links and groups with the backend, which
        torch.compile's caches keep until torch._dynamo.reset(), and then the code in
        torch.distributed's record of its last 2,000 operations.
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

    def accept(self, values: Iterable[object]) -> None:
        """Raises PlanError if a model among a frame's values is shared out already."""
        for value in values:
            refuse_wrappers(value)

    def tracing(self) -> AbstractContextManager[None]:
        """Where the model may be traced: tracers want gradients of whole weights."""
        return hidden_gradients()

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
            self._events, self._arrivals = self._timelines(), self._last.arrivals
            self._last = None

    def __call__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Sequence[Any]]:
        """torch.compile's side: from a traced graph to a function of its inputs."""
        gm = inline_bodies(gm)
        broken = left_to_python() or compile_options_error(options)
        note_call(gm, inputs)
        nodes = enumerate(placeholders(gm))
        kept = [i for i, node in nodes if node.meta["origin"] is not None]
        captured = gm
        if broken is None:
            try:
                captured = aten_graph(gm)
            except PlanError as error:
                broken = error
        broken = broken or fixed_size(gm, inputs, self.request)

        def call(*args: Any) -> Sequence[Any]:
            try:
                if broken is not None:
                    refuse_outer_ddp()
                    raise broken
                return self.run(captured, tuple(args[i] for i in kept))
            except GraphBreak:
                raise
            except BaseException as error:
                self._write(error)
                raise

        return call

    def exported(
        self,
        model: nn.Module,
        broken: GraphBreak,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Route:
        """The model as torch.export traces it, where Dynamo breaks it; see Route."""
        refuse_wrappers(model)
        route = Route(model, self, broken)
        route.trace(args, kwargs)
        return route

    def __deepcopy__(self, memo: object) -> Backend:
        """Itself: the copy of a compiled model has weights of its own, not workers."""
        return self

    def sized(
        self, gm: fx.GraphModule, args: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Padded | None]:
        """The arguments with the rows of all ranks, if this one passes its own, or with
        a batch that divides, if it is to be filled up."""
        request = self.request
        if request.rows == "local" and isinstance(self._workers, Ranks):
            return spread_rows(gm, args, request, self._workers.rank), None
        padded = pad(gm, args, request) if request.ragged == "pad" else None
        return (args if padded is None else padded.args), padded

    def run(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> Sequence[Any]:
        """A call of a compiled function: plans it if it is new, and runs it."""
        if self.closed:
            raise PlanError(
                "this backend is closed; compile the model with a new one, "
                "torch.compile(model, backend=fxsched.backend(schedule))"
            )
        refuse_outer_ddp()
        self._start_workers()
        if isinstance(self._workers, Ranks):
            self._workers.call()
        args, padded = self.sized(gm, args)
        step = self._step(gm, args)
        if padded is not None:
            check_padded(gm, step.plan)
        if self._last is None or step.plan.trains or not self._last.plan.trains:
            self._last, self.plan = step, step.plan
        for write in early_writes(gm):
            if not is_given_up(args[write.read[0]]):
                write(*args)
        outputs = call_step(step, args, self._said)
        for output, value in zip(step.plan.outputs, outputs, strict=True):
            old = args[output.state or 0] if output.replaced else None
            if isinstance(old, Tensor) and old in OWNERSHIPS:
                OWNERSHIPS[value] = OWNERSHIPS[old]
        if padded is not None:
            outputs = padded.trimmed(outputs, step.plan)
        return cut_outputs(gm, outputs)

    def _step(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> Step:
        """The step for these inputs, planned now if there is none yet."""
        key = step_key(gm, args)
        step = self._planned(key, gm, args)
        workers = self._start_workers()
        if not workers.settle(step.plan, args):
            # another model of the class, whose weights an earlier plan put elsewhere
            places = workers.owners(args), workers.updaters(args)
            step = self._planned(f"{key}\n{places}", gm, args)
            assert workers.settle(step.plan, args), "owners were planned for"
        return step

    def _planned(self, key: str, gm: fx.GraphModule, args: tuple[Any, ...]) -> Step:
        """The step of this key, planned now unless it is one of the last PLANS."""
        with modes_after_errors():
            step = self._steps.pop(key, None) or self.make(gm, args)
        self._steps[key] = step
        if len(self._steps) > PLANS:  # by the order of calls: on all ranks the same
            del self._steps[next(iter(self._steps))]
        return step

    def make(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> Step:
        """Plans a step for these inputs."""
        began, workers = time.perf_counter(), self._start_workers()
        step = make_step(gm, args, self.options, workers)
        kind = "planned" if step.plan.trains else "planned without gradients"
        if 0 in workers.here:
            took = time.perf_counter() - began
            tell(f"{kind} in {took:.1f} s: {step.plan.line}", kind in self._said)
            self._said.add(kind)
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
            if self.options.recorder is not None:
                self.options.recorder.start(self._workers)
            self.forget()

    def forget(self) -> None:
        """What ranks ask at the first calls of a plan they ask anew."""
        for step in self._steps.values():
            step.forget()

    @property
    def alone(self) -> bool:
        """Whether this process has all workers; the first to ask starts them."""
        return not isinstance(self._start_workers(), Ranks)

    def _write(self, error: BaseException) -> None:
        """Writes the flight record, if there is one to keep."""
        recorder = self.options.recorder
        if recorder is not None and self._workers is not None:
            recorder.write(error, self._workers)

    def _start_workers(self) -> Workers:
        """The workers, started with the first call."""
        if self._workers is None:
            count, options = self.request.schedule.workers, self.options
            self._workers = workers_of(options.transport, count, options.timeout)
            if isinstance(self._workers, Ranks):
                end = weakref.finalize(self, self._workers.close)
                end.atexit = False  # threads end with their pool
            if options.recorder is not None:
                options.recorder.start(self._workers)
        return self._workers

    @property
    def timeline(self) -> tuple[Event, ...]:
        """The jobs of the call that `plan` is of, of all workers, in the order of their
        starts; seconds from the start of the call.

        Raises PlanError without backend(profile=True), and before the first call.
        """
        if not self.options.record:
            raise PlanError("there is no timeline; use backend(schedule, profile=True)")
        if self._last is None and self._events is None:
            raise PlanError("there is no timeline before the first call")
        return self._timelines()[-1]

    @property
    def metrics(self) -> Metrics:
        """Seconds of the last steps, and what each worker did in them, sent and held:
        .openmetrics() is text for Prometheus, .log(writer, step) goes to TensorBoard.

        Steps are calls of what `plan` is of, the last 10 with all of their jobs; every
        rank has the figures of all. Raises PlanError as `timeline` does, and before
        the first step has ended.
        """
        if not self.options.record:
            raise PlanError("there are no metrics; use backend(schedule, profile=True)")
        timelines = self._timelines()
        if self.plan is not None:
            whole = len(self.plan.jobs)
            timelines = [each for each in timelines if len(each) == whole]
        if self.plan is None or not timelines:
            raise PlanError("there are no metrics before the first step has ended")
        return metrics_of(self.plan, timelines)

    def _timelines(self) -> list[tuple[Event, ...]]:
        """Those of the last calls of what `plan` is of, the latest at the end."""
        if self._last is None:
            return self._events or [()]
        return [*self._last.earlier, self._last.events]

    @property
    def arrivals(self) -> tuple[Job, ...]:
        """The reads and updates of weights in the call that `plan` is of, where updates
        are in order of arrival (Schedule(ahead=), order="dynamic"): 0F3 where stage 0
        is read for microbatch 3, 0U3 where it takes that one's gradient. Those of a
        stage are in the order in which they came; fxsched.replay takes them.

        Raises PlanError where updates are in the planned order, and before a call.
        """
        if self.plan is None:
            raise PlanError("there are no arrivals before the first call")
        if not self.plan.by_arrival:
            raise PlanError(
                "there are no arrivals: updates are in the planned order; use "
                "backend(schedule, order='dynamic') and a schedule with ahead="
            )
        return self._arrivals if self._last is None else self._last.arrivals


def _leave(backend: weakref.ref[Backend]) -> None:
    left = backend()
    if left is not None:
        left.leave()
