"""The torch.compile entry: trace, plan, and run each call of the compiled function."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

from .autodiff.activation_checkpoints import inline_bodies
from .capture.batch import fixed_size
from .capture.chosen_rows import cut_outputs
from .capture.dynamo import (
    configure_dynamo,
    note_call,
)
from .capture.functional import early_writes
from .capture.graph_breaks import GraphBreak, left_to_python
from .capture.graph_inputs import placeholders
from .capture.lowered import aten_graph
from .clock.timeline import Event
from .ir.meta import of_node
from .ir.modes import modes_after_errors
from .jobs.job import Job, PlanError
from .options import Options, compile_options_error, takes_options
from .params.cut_weights import hidden_gradients
from .params.record import note, placed, record_of
from .params.released import is_given_up, refuse_calls
from .params.store import ParamStore
from .planning import make_step
from .plans.metrics import Metrics, metrics_of
from .plans.plan import Plan
from .progress import Progress, tell
from .route import Route
from .runtime.autograd_call import call_step
from .runtime.local_rows import spread_rows
from .runtime.padding import Padded, check_padded, pad
from .runtime.ranks import Ranks
from .runtime.step import Step
from .runtime.step_key import step_key
from .runtime.workers import Workers, workers_of
from .torch_compat.tracebacks import quiet_fakes, shortened
from .transport.world import IN_PROCESS, own_rank
from .transport.wrappers import refuse_outer_ddp, refuse_wrappers

PLANS = 64  # that a backend keeps


@takes_options(Options)
def backend(options: Options) -> Backend:
    """A torch.compile backend that runs a model by a schedule.

    If the compiled function returns one scalar loss, the call runs F and B, and
    loss.backward() adds the finished gradients to .grad. Otherwise the call runs F, and
    backward() runs B. If gradients are disabled, only F runs.
    If one rank fails, or makes other calls than the other ranks (for example, it alone
    evaluates), all ranks stop with an error that says so; see Backend.reset.
    Raises PlanError for options that don't exist, and, in the first call of the model,
    for a model or schedule that can't be planned.
    """
    return Backend(options)


class Backend:
    """The object that fxsched.backend returns.

    plan: the Plan of the last call with gradients or, if there was none, of the last
        call without; None before the first call.
    timeline: when each job of that call ran.
    metrics: times, bytes and memory of the last steps.
    params: the model's parameters and buffers, by name.

    A backend keeps 64 plans, one for each combination of model, input shapes and mode
    (training or not); a call with another combination replaces the plan that was unused
    for longest. A backend is a context manager; see close().
    """

    def __init__(self, options: Options) -> None:
        self.options, self.request = options, options.request
        self.plan: Plan | None = None
        self.params = ParamStore()
        self.closed = False
        self._last: Step | None = None
        self._workers: Workers | None = None
        self._events: list[tuple[Event, ...]] | None = None  # once it is closed
        self._arrivals: tuple[Job, ...] = ()  # then too
        self._served: weakref.WeakSet[Any] = weakref.WeakSet()
        self._steps: dict[Hashable, Step] = {}  # the last one to be called is the last
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
        """Ends threads, links and process groups, and frees all plans except `plan`.

        Every rank must call close(). Calling a compiled function after close() raises
        PlanError. Without close(), plans and threads are freed with the last function
        that was compiled with this backend, and the links and groups of ranks with the
        backend. The caches of torch.compile keep the backend until
        torch._dynamo.reset(). After that, torch.distributed's record of its last 2,000
        operations may still keep it.
        """
        self.closed = True
        self._rest()
        if self._workers is not None:
            self._workers.close()

    def serve(self, function: object) -> None:
        """Keeps this backend's threads until this compiled function is freed."""
        if function not in self._served:
            self._served.add(function)
            weakref.finalize(function, _leave, weakref.ref(self)).atexit = False

    def accept(self, values: Iterable[object]) -> None:
        """Raises PlanError if a model among `values` is wrapped in DDP or FSDP.

        On ranks, a module without its parameters then raises an error if it is called.
        """
        ranks = self.options.transport not in IN_PROCESS and own_rank() is not None
        for value in values:
            refuse_wrappers(value)
            if ranks and isinstance(value, nn.Module):
                refuse_calls(value)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Hides the gradients of parts of weights while the model is traced."""
        what = "tracing the model"
        if self._last is not None and isinstance(self._workers, Ranks):
            what += " again, as each rank has only its own parameters by now"
        with hidden_gradients(), quiet_fakes(), Progress(what):
            yield

    def leave(self) -> None:
        """Frees plans and threads if no compiled function can use them any more.

        The links of ranks stay: only all ranks together can end them, by close().
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
        kept = [i for i, node in nodes if of_node(node)["origin"] is not None]
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
                raise shortened(error)  # noqa: B904

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
        """The arguments for all ranks, if each passes its own rows (rows="local"), or
        filled up to a batch that divides (ragged="pad")."""
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
            self._workers.follow(args, self.request.order == "static")
        self.params.take(gm.meta["state"], args)
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
            if isinstance(old, Tensor) and record_of(old).owners:
                note(value, **record_of(old).place)
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
            places = [(i, each.owners, each.updater) for i, each in placed(args)]
            step = self._planned((key, *places), gm, args)
            assert workers.settle(step.plan, args), "owners were planned for"
        return step

    def _planned(
        self, key: Hashable, gm: fx.GraphModule, args: tuple[Any, ...]
    ) -> Step:
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
        """Makes all ranks ready for further calls after one has failed.

        Every rank must call reset(). With threads, reset() does nothing.

        loaded: whether all ranks have since loaded the same parameters, buffers and
            optimizer state, for example from a checkpoint. Then some ranks may have
            finished more calls than others.
        Raises PlanError if some ranks had finished more calls than others, unless
        `loaded`; TimeoutError if not all ranks call reset() within the timeout.
        """
        if isinstance(self._workers, Ranks):
            self._workers.reset(loaded)
            if self.options.recorder is not None:
                self.options.recorder.start(self._workers)
            self.forget()

    def forget(self) -> None:
        """Makes ranks compare inputs and random generators again, as at first calls."""
        for step in self._steps.values():
            step.forget()

    @property
    def alone(self) -> bool:
        """Whether this process has all workers, which it starts if none run yet."""
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
            share = not options.deterministic
            self._workers = workers_of(options.transport, count, options.timeout, share)
            if isinstance(self._workers, Ranks):
                end = weakref.finalize(self, self._workers.close)
                end.atexit = False  # threads end with their pool
            if options.recorder is not None:
                options.recorder.start(self._workers)
        return self._workers

    @property
    def timeline(self) -> tuple[Event, ...]:
        """The jobs of the call that `plan` belongs to, on all workers, with times.

        Jobs are in the order of their starts. Times are in seconds from the start of
        the call. Raises PlanError without backend(profile=True), and before the first
        call.
        """
        if not self.options.record:
            raise PlanError("there is no timeline; use backend(schedule, profile=True)")
        if self._last is None and self._events is None:
            raise PlanError(
                "there is no timeline before the first call; call the model first"
            )
        return self._timelines()[-1]

    @property
    def metrics(self) -> Metrics:
        """Times of the last steps, and how busy each worker was, what it sent and held.

        `.openmetrics()` returns the metrics as text for Prometheus, and `.log(writer,
        step)` writes them to TensorBoard. They cover the last 10 complete calls that
        ran `plan`. Every rank has the metrics of all workers.
        Raises PlanError without backend(profile=True), and before the first step has
        ended.
        """
        if not self.options.record:
            raise PlanError("there are no metrics; use backend(schedule, profile=True)")
        timelines = self._timelines()
        if self.plan is not None:
            whole = len(self.plan.jobs)
            timelines = [each for each in timelines if len(each) == whole]
        if self.plan is None or not timelines:
            raise PlanError(
                "there are no metrics before the first step has ended; train one first"
            )
        return metrics_of(self.plan, timelines)

    def _timelines(self) -> list[tuple[Event, ...]]:
        """Those of the last calls of what `plan` is of, the latest at the end."""
        if self._last is None:
            return self._events or [()]
        return [*self._last.earlier, self._last.events]

    @property
    def arrivals(self) -> tuple[Job, ...]:
        """Reads and updates of weights in the call that `plan` belongs to, in order.

        Only for updates in order of arrival (Schedule(ahead=), order="dynamic"). `0F3`
        is the read of stage 0's weights for microbatch 3; `0U3` is the update of stage
        0 with the gradient of microbatch 3. The reads and updates of one stage are in
        the order in which they happened. fxsched.replay takes this list.

        Raises PlanError if updates are in the planned order, and before the first call.
        """
        if self.plan is None:
            raise PlanError(
                "there are no arrivals before the first call; call the model first"
            )
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
