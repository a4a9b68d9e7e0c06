"""The options of fxsched.backend, and which of them exclude each other.

Options describes them in one place: backend, plan, verify and the commands use it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from os import PathLike
from pathlib import Path
from typing import (
    Any,
    Literal,
    NoReturn,
    ParamSpec,
    TypeVar,
    get_args,
    get_type_hints,
)

import torch
from torch import fx
from torch.optim import Optimizer

from .capture.caller import Dims
from .clock.network import Wires
from .ir.loss_scale import Scale, read_scale
from .ir.request import (
    BatchNorm,
    BufferReduction,
    Capture,
    Carry,
    CheckInputs,
    CutWord,
    Device,
    LossReduction,
    Order,
    OutputReduction,
    Pairs,
    PassedRows,
    Ragged,
    Request,
    StageCompiler,
    Sums,
    Transport,
)
from .jobs.job import MISUSE, PlanError
from .jobs.schedule import Schedule
from .jobs.user_values import is_int
from .option_checks import CHECKS, Check, flag, words
from .partition.measure import Profile
from .passes.model_passes import ModelPass
from .passes.users import Pass
from .runtime.input_agreement import InputRule
from .runtime.recorder import Recorder
from .torch_compat.tracebacks import shortened

Result = TypeVar("Result")
P = ParamSpec("P")


@dataclass(frozen=True)
class Options:
    """What a backend does: the arguments of fxsched.backend, checked.

    schedule: the Schedule: where each job runs, and in which order.
    stages: "auto", or names of modules, each of which starts a new stage.
    transport: "threads" (workers are threads of this process), "distributed" (each
        worker is a rank; ranks of one host pass values through shared memory), "gloo"
        (each worker is a rank, and all values go through the process group), "nccl"
        (each worker is a rank, and values go from GPU to GPU), "strict" (threads that
        send by NCCL's rules; what would hang on GPUs is an error), or None: "threads"
        without a process group or torchrun; "nccl" if the model is on a GPU, order is
        "static" and PyTorch has NCCL; else "distributed".
    order: "static" (each worker runs its program as planned; schedules with
        in_order=True always do) or "dynamic" (of the jobs that are ready, a worker runs
        the one with the smallest n).
    carry: "saved" (B gets the tensors that F saved), "recompute" (B gets the stage's
        inputs and runs F again), or "auto": "saved", and under a memory_limit blocks of
        the model are computed again as far as that makes the step fit. Or a function of
        the stage that returns "saved" or "recompute"; or a dict from names of modules,
        in which * stands for any, to these words: B gets the inputs of a module that is
        "recompute", and runs it again when it needs it. The last name that fits counts.
    loss_reduction: "exact" (the loss and outputs that eager PyTorch computes on the
        whole batch; operations in which rows of the batch meet run once, in a
        global-batch stage, and all others on microbatches); "mean" or "sum" of the
        microbatches' losses; or "weighted": like "exact" but without global-batch
        stages; the loss must be a sum, a mean, or a mean whose weights (ignored labels,
        masks) depend on inputs alone, and any other loss is a PlanError.
    pairs: how to compute pairs of rows of the batch, as in CLIP's logits: "joint", all
        pairs in one global-batch stage; "spread", if possible, each microbatch computes
        the pairs of its own rows with all rows, whose embeddings are gathered; "auto",
        the one of the two with the shorter predicted step.
    batch_norm: what BatchNorm computes statistics over in training: the whole "batch",
        as eager does, in global-batch stages, or each "microbatch". None: the whole
        batch if the loss and each update are of the whole batch
        (loss_reduction="exact"), else each microbatch. Plan.explain() shows the cost.
    stage_compiler: "eager" or "inductor".
    passes: functions (program, request) -> program that change each worker's program
        before fxsched inserts the frees; see fxsched.passes.
    memory_limit: bytes that stages="auto" may put on a worker: weights, their gradients
        activations, and what a job takes only while it runs; with optimizer=, its state
        and older versions of weights too.
    same_stage: groups of names of modules, to keep in one stage with all between them.
    profile: True to record when each job runs, for backend.timeline; or the result of
        fxsched.profile, which also makes stages="auto" cut by measured times instead of
        estimates.
    prefetch: the weights of how many further jobs a worker asks others for; it holds
        the fetched weights of at most prefetch + 1 jobs at a time. By default 1,
        or 2 between several hosts, where a request takes longer. Also how many jobs
        before B its activations come back, if they wait elsewhere (Placement.saved).
    check_inputs: at which calls ranks compare checksums of their inputs, which must be
        the same whole batch: "first" (the first three calls of each plan; later calls
        compare a few elements of each input, which takes almost no time), "always" or
        "never".
    input_from: the rank whose inputs all ranks use, at each call. The other ranks pass
        tensors of the same shapes and types.
    batch_dims: a dict from arguments, by name (x, batch['x']) or position, to the
        dimension along which they have their samples. A dimension may have several rows
        for each sample, one after the other. None instead of a dimension: the argument
        is not cut, and all microbatches get all of it. All other arguments are cut
        along dimension 0, and must have the same length there.
    ragged: what becomes of a batch that doesn't divide into the microbatches: "error";
        "fewer", the largest number of microbatches that divides it, so that they are
        equal and the loss stays the mean (with 4 microbatches, a batch of 6 runs as 3,
        and a batch of 7 as one); or "pad", the last sample is repeated, for models that
        return rows and no loss.
    rows: "all", every rank passes whole batches; or "local", each rank passes only the
        rows that schedule.local_rows(rank, batch) lists, in that order, and gets whole
        outputs; see LocalSampler. In one process both are the same.
    buffers: how to combine the values of several workers that run the F of a stage, for
        each buffer that F writes microbatch after microbatch (which happens with
        several updates in a call, and with BatchNorm over microbatches), by its name:
        "mean", "sum" (of what each worker added) or "last" (the value after the last
        microbatch). By default running statistics are averaged and counters summed.
        All other such buffers need an entry, or a schedule in which one worker runs F
        of a stage for all microbatches, as in schedules.gpipe.
    outputs: how to combine the microbatches' values of an output without a row for each
        sample, by its key in what the model returns, its attribute, or its position:
        "mean", "sum", "max", "min" or "last". Each such output needs an entry, except
        the loss and outputs that are the same for all microbatches.
    timeout: seconds that a rank waits for others at most, before it ends with
        TimeoutError; by default the process group's timeout. After 10 s a line on
        stderr says who waits for whom.
    loss_scale: the factor of the loss's gradient, if B runs in float16: the
        torch.amp.GradScaler, a number, or a function that returns a number, called in
        each call of the model. backward() then gives scaled gradients, as
        scaler.scale(loss).backward() does.
    optimizer: the torch.optim.Optimizer that the program steps: loss = step(x) trains,
        without backward() and step(). Each call makes one step, or several with
        schedule.update_every. The model must return one scalar loss. Learning rates and
        other settings may change between calls. Evaluate under torch.no_grad().
    clip_grad_norm: with optimizer=, the largest norm of all gradients; larger ones are
        scaled down as torch.nn.utils.clip_grad_norm_ does it, to the same bits under
        every schedule.
    skip_nonfinite: with optimizer=, whether updates are skipped where the norm of all
        gradients is not finite.
    flight_record: a folder, used by this backend alone, for the jobs and messages of
        the last 3 calls. When a call fails, each rank writes them to a file there;
        `fxsched blame FOLDER` reads these files. Files of earlier runs are moved to the
        subfolder "earlier".
    deterministic: whether gradients have the same bits under every schedule: those of
        one process that runs the microbatches one after another and accumulates. Sums
        over microbatches are computed in the order of microbatches on one worker; if
        several workers give gradients of a weight, that worker receives the gradient of
        each microbatch. Raises PlanError for a model or cut that doesn't allow this. On
        a GPU, operations may still differ from call to call unless you call
        torch.use_deterministic_algorithms(True).
    check_finite: whether each job looks for NaN and Inf in its results (values with a
        gradient, gradients, weights after an update in the program) before it hands
        them on. The first NaN or Inf raises FloatingPointError on every rank, which
        names the job, and the operation's module and line. On a GPU each check waits
        for the job to finish.
    gradient_dtype: the type in which gradients of parameters are added up, over
        microbatches and workers, such as torch.float32 for bfloat16 parameters. The
        finished sum is cast once, to the parameter's type, for .grad and the optimizer.
        None: sums have the parameter's type too.
    encode: which values workers send each other in fewer bytes: a dict from
        "activations" (and their gradients), "weights" (parameters that jobs fetch) and
        "gradients" (of weights) to torch.bfloat16, torch.float16, which overflows above
        65504, or torch.int8, which has a float32 scale for each 256 elements. The
        sender rounds the value. All who read it then read the rounded value, also on
        the sender; only weights stay exact where they are kept. Sent as they are:
        integers, bools, numbers (0-d), tensors that would not become smaller, what the
        model returns, what F saves for its B, and buffers. The schedule decides what is
        sent, so this option excludes deterministic=True.
    shards: which weights are cut, where the schedule has shards (schedules.sharded):
        "auto" (all weights that can be cut so that shards exchange only sums), or a
        dict from patterns of names of modules to words, such as
        {"blocks.*.attention.query": "column", "blocks.*.attention.out": "row"}:
        "column" cuts a weight along its outputs, "row" along its inputs, over which it
        sums, as the styles of torch.distributed.tensor.parallel do; "sequence" is for
        norms and dropout that each shard computes for a slice of the rows; "expert"
        cuts a stack [experts, .., ..] into whole experts.
    model_passes: functions (gm, request) -> gm that change the model's graph of one
        microbatch before it is cut into stages; see docs/passes.md.
    sums: how workers that all want a sum of gradients add it up: "messages", one worker
        adds it up and sends it to the others; "pieces", each worker adds up one piece
        beside its jobs, and sends it to the others; the workers of one host first add
        up their own gradients; "ring", the same, but each host sends to the next host
        only; "collective", an all_reduce of NCCL. "auto": collective between GPUs with
        NCCL; pieces between two hosts, and between ranks with transport="gloo"; ring
        between more hosts; else messages. With deterministic=True, messages.
    network: the network that messages go through: a fxsched.Network or Link, or a file
        that `fxsched network` wrote. fxsched uses its speeds to choose stages and
        shards and to predict the step, and its hosts to add up gradients host by host.
        By default all workers are on one host, with roughly estimated speeds.
    device: the device whose speeds fxsched estimates costs with, to choose stages and
        shards and to predict the step: "cpu" (one core), "A10", "L4", "A100", "H100" or
        "H200". Name it to plan for another machine than this one. By default the device
        that the model is on.
    capture: "graphs": the functions of stages (F, B and W) are captured as CUDA graphs
        and replayed. Functions that draw random numbers, or in which values decide what
        is launched, run without a graph. None: no graphs.
    """

    schedule: Schedule
    stages: str | Sequence[str] = "auto"
    transport: Transport | None = None
    order: Order = "static"
    carry: Carry | Callable[[int], Carry] | Mapping[str, Carry] = "auto"
    loss_reduction: LossReduction = "exact"
    stage_compiler: StageCompiler = "eager"
    passes: Sequence[Pass] = ()
    memory_limit: float | None = None
    same_stage: Sequence[Sequence[str]] = ()
    profile: Profile | bool | None = None
    prefetch: int | None = None
    check_inputs: CheckInputs = "first"
    input_from: int | None = None
    batch_dims: Dims | None = None
    ragged: Ragged = "error"
    rows: PassedRows = "all"
    buffers: Mapping[str, BufferReduction] | None = None
    outputs: Mapping[int | str, OutputReduction] | None = None
    timeout: float | None = None
    loss_scale: object = None
    optimizer: Optimizer | None = None
    clip_grad_norm: float | None = None
    skip_nonfinite: bool = False
    pairs: Pairs = "auto"
    batch_norm: BatchNorm | None = None
    flight_record: str | PathLike[str] | None = None
    deterministic: bool = False
    check_finite: bool = False
    gradient_dtype: torch.dtype | None = None
    encode: Mapping[str, torch.dtype] | None = None
    shards: Literal["auto"] | Mapping[str, CutWord] = "auto"
    model_passes: Sequence[ModelPass] = ()
    sums: Sums = "auto"
    network: Wires | str | PathLike[str] | None = None
    device: Device | None = None
    capture: Capture | None = None

    def __post_init__(self) -> None:
        for name, check in CHECKED.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        for met, what in conflicts(self):
            if met:
                raise PlanError(what)

    @cached_property
    def request(self) -> Request:
        """What is planned: the options that passes read."""
        own = {each.name for each in fields(Request)} & CHECKED.keys()
        chosen: dict[str, Any] = {name: getattr(self, name) for name in own}
        chosen["hosts"] = getattr(self.network, "hosts", ())
        scaled, most = self.loss_scale is not None, self.schedule.microbatches
        return Request(**chosen, scaled=scaled, most=most)

    @property
    def measured(self) -> Profile | None:
        """What stages are cut by, if it isn't estimates alone."""
        return self.profile if isinstance(self.profile, Profile) else None

    @property
    def record(self) -> bool:
        """Whether steps note when each job started and ended."""
        return bool(self.profile)

    @property
    def inputs(self) -> InputRule:
        """How ranks come to run on the same inputs."""
        return InputRule(self.check_inputs, self.input_from)

    @cached_property
    def scale(self) -> Scale | None:
        """What gives a call's loss scale."""
        return read_scale(self.loss_scale)

    @cached_property
    def recorder(self) -> Recorder | None:
        """What keeps the flight record of the last calls."""
        folder = self.flight_record
        return None if folder is None else Recorder(Path(folder))


def _check_of(name: str, hint: Any) -> Check:
    """An option's own check; for words and bools what its type says."""
    if name in CHECKS:
        return CHECKS[name]
    if hint is bool:
        return flag
    allowed = get_args(hint)
    return words(*(None if w is type(None) else w for w in _flat(allowed)))


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """The words of a Literal, and those of a union of one with None."""
    for value in values:
        yield from get_args(value) or (value,)


CHECKED = {
    name: _check_of(name, hint) for name, hint in get_type_hints(Options).items()
}
RUNS = {  # plans are the same whatever these are
    "transport",
    "stage_compiler",
    "check_inputs",
    "input_from",
    "rows",
    "timeout",
    "loss_scale",
    "flight_record",
    "capture",
}
NAMES = tuple(CHECKED)[1:]  # all but the schedule
PLANNED = tuple(name for name in NAMES if name not in RUNS)
OF_SCHEDULES = "workers", "microbatches"  # arguments of schedules


def conflicts(options: Options) -> Iterator[tuple[bool, str]]:
    """What doesn't go together: whether it was asked for, and what to say."""
    schedule, request, rank = options.schedule, options.request, options.input_from
    every, workers = schedule.update_every, schedule.workers
    averaged, arrivals = schedule.average_every is not None, request.by_arrival
    if request.network is not None:
        request.network.check_workers(workers)
    yield (
        not (rank is None or (is_int(rank) and 0 <= rank < workers)),
        f"backend(input_from={rank!r}): give a rank, 0 to {workers - 1}",
    )
    weighted, exact = (options.loss_reduction == word for word in ("weighted", "exact"))
    whole = options.ragged != "error" or rank is not None or weighted
    yield (
        options.transport in ("strict", "nccl") and options.order == "dynamic",
        f"backend(transport={options.transport!r}, order='dynamic'): messages are "
        "matched by their "
        "order, which must be that of the plan; leave order= out",
    )
    yield (
        options.sums in ("pieces", "ring", "collective") and options.deterministic,
        f"backend(sums={options.sums!r}) doesn't go with deterministic=True, where "
        "one worker adds up all gradients of a weight; leave one of them out",
    )
    yield (
        options.sums == "collective" and request.encode.gradients is not None,
        "backend(sums='collective', encode={'gradients': ..}): a collective adds up "
        "gradients as they are; leave one of them out",
    )
    yield (
        averaged and request.encode.gradients is not None,
        "backend(encode={'gradients': ..}): Schedule(average_every=) averages "
        "replicas, and sends no gradients; leave 'gradients' out",
    )
    yield (
        options.rows == "local" and whole,
        "backend(rows='local') doesn't go with ragged=, input_from= or "
        "loss_reduction='weighted', which need the whole batch on every rank",
    )
    yield (
        options.batch_norm == "batch" and not exact,
        'batch_norm="batch" runs BatchNorm in global-batch stages, which come with '
        f'loss_reduction="exact", not "{options.loss_reduction}"; leave one of them '
        "out",
    )
    yield (
        options.shards != "auto" and schedule.shards == 1,
        "backend(shards=) says which weights are cut, but the schedule has one shard; "
        f"give it fxsched.schedules.sharded({schedule.name or 'schedule'}, 2), or "
        "leave shards= out",
    )
    for asked, what in (
        (averaged, "average_every= (a shard has no replica of what all shards read)"),
        (arrivals, "updates in order of arrival (take order='static')"),
        (
            options.deterministic,
            "deterministic=True (shards add up gradients in another order)",
        ),
    ):
        yield (
            asked and schedule.shards > 1,
            f"Schedule(shards={schedule.shards}) doesn't go with {what}; leave one of "
            "them out",
        )
    for asked, what in (
        (
            arrivals,
            "order='dynamic' with Schedule(ahead=) steps in order of arrival; take "
            "order='static'",
        ),
        (
            averaged,
            "Schedule(average_every=) averages replicas that step by themselves; leave "
            "it out",
        ),
        (
            options.stage_compiler == "inductor",
            "stage_compiler='inductor' rounds as it fuses, and fuses stage by stage; "
            "take 'eager'",
        ),
        (
            options.pairs == "spread",
            "pairs='spread' adds up gradients of embeddings by rows; take 'joint'",
        ),
        (
            any(options.encode or ()),
            "encode= rounds what goes from worker to worker, which the schedule "
            "decides; leave it out",
        ),
    ):
        yield asked and options.deterministic, f"backend(deterministic=True): {what}"
    yield (
        weighted and (averaged or every not in (None, schedule.microbatches)),
        "backend(loss_reduction='weighted') weighs rows over the whole batch, and an "
        f"update every {every} microbatches sees only its own; take update_every=None, "
        "or another loss_reduction",
    )
    yield (
        options.optimizer is not None and options.loss_scale is not None,
        "backend(optimizer=, loss_scale=): a GradScaler's step is not in the program; "
        "train in bfloat16, or leave optimizer= out",
    )
    yield (
        options.device is not None and options.measured is not None,
        f"backend(profile=, device={options.device!r}): a profile has the times of the "
        "device that it was measured on; leave one of them out",
    )
    for name in ("clip_grad_norm", "skip_nonfinite"):
        yield (
            options.optimizer is None and bool(getattr(options, name)),
            f"{name}= is about updates in the program; give it the optimizer too, "
            "backend(schedule, optimizer=optimizer)",
        )


@contextmanager
def named_in_errors(call: str) -> Iterator[None]:
    """What is wrong with an option is said of the call that it was given to."""
    try:
        yield
    except (PlanError, TypeError) as error:
        text = str(error)
        if text.startswith("backend("):
            error.args = (text.replace("backend(", f"{call}(", 1), *error.args[1:])
        raise


def takes_options(
    options: Callable[P, Options],
) -> Callable[[Callable[[Options], Result]], Callable[P, Result]]:
    """Has a function of Options take what they are made of, as arguments of its own,
    which its signature shows and its docstring describes."""
    takes = inspect.signature(options)

    def decorate(make: Callable[[Options], Result]) -> Callable[P, Result]:
        @wraps(make)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            if args and isinstance(args[0], fx.GraphModule):
                return uncalled  # type: ignore[return-value]  # to torch.compile
            try:
                takes.bind(*args, **kwargs)
            except TypeError as error:
                unknown = (name for name in kwargs if name not in CHECKED)
                hint = _hint(next(unknown, ""))
                wrong = TypeError(f"{make.__name__}() {error}{hint}")
                vars(wrong)[MISUSE] = True
                raise wrong from None
            try:
                return make(options(*args, **kwargs))
            except PlanError as error:
                raise shortened(error)  # noqa: B904

        returned = inspect.signature(make).return_annotation
        shown = takes.replace(return_annotation=returned)
        call.__signature__ = shown  # type: ignore[attr-defined]
        listed = (inspect.getdoc(options) or "").partition("\n")[2].strip()
        call.__doc__ = f"{inspect.getdoc(make)}\n\n{listed}"
        return call

    return decorate


def parted(
    call: str, model: Callable[..., Any], names: Sequence[str], given: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments that are options of these names, and those of the model.

    Raises PlanError for what is neither.
    """
    own = {name: given[name] for name in given if name in names}
    rest = {name: given[name] for name in given if name not in names}
    _check_keywords(call, model, rest, names)
    return own, rest


def _hint(name: str) -> str:
    """What else may be meant by a word that is no option."""
    if not name:
        return ""
    if name in OF_SCHEDULES:
        return (
            f"; {name}= is an argument of a schedule, such as "
            "fxsched.schedules.one_f_one_b(workers=2, microbatches=4)"
        )
    if near := difflib.get_close_matches(name, CHECKED, 1):
        return f"; did you mean {near[0]}=?"
    for option, hint in get_type_hints(Options).items():
        if name in _flat(get_args(hint)):
            return f"; did you mean {option}={name!r}?"
    return f"; its options are {', '.join(NAMES)}"


def with_names(call: Callable[..., Any], names: Sequence[str]) -> inspect.Signature:
    """The signature of a call that takes options of these names among keywords."""
    own, options = inspect.signature(call), inspect.signature(Options).parameters
    *first, last = own.parameters.values()
    more = [
        options[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in names
    ]
    return own.replace(parameters=[*first, *more, last])


def _check_keywords(
    call: str, model: Callable[..., Any], names: Iterable[str], options: Iterable[str]
) -> None:
    """Raises PlanError for names that are arguments neither of the model nor of a call
    with these options."""
    try:
        takes = inspect.signature(getattr(model, "forward", model)).parameters
    except (TypeError, ValueError):  # of some functions it isn't known
        return
    if any(taken.kind is taken.VAR_KEYWORD for taken in takes.values()):
        return
    for name in (name for name in names if name not in takes):
        near = difflib.get_close_matches(name, [*takes, *options], 1)
        hint = f"did you mean {near[0]}=?" if near else "leave it out"
        raise PlanError(
            f"{call}({name}=): neither an option of fxsched.{call} nor an argument of "
            f"the model; {hint}"
        )


def uncalled(*inputs: object) -> NoReturn:
    """What torch.compile(model, backend=fxsched.backend) gets: the error, in the first
    call of the model."""
    raise PlanError(
        "torch.compile(backend=fxsched.backend) names the function; give what it "
        "makes, torch.compile(model, backend=fxsched.backend(schedule))"
    )


def compile_options_error(options: Mapping[str, object]) -> PlanError | None:
    """The error for what torch.compile was given besides the backend, if anything."""
    if not options:
        return None
    words = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return PlanError(
        f"torch.compile({words}) is for Inductor; leave it out, or take "
        "fxsched.backend(schedule, stage_compiler='inductor') to compile stages with it"
    )
