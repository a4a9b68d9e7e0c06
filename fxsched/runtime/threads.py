"""All workers as threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from ..ir.loss_scale import Gradients
from ..ir.step import Way
from ..jobs.job import PlanError
from ..params.lazy import make_all
from ..params.released import is_given_up
from ..plans.plan import Plan
from ..transport.endpoints import Aborted, Exchange, ThreadEndpoint
from ..transport.strict import StrictEndpoint, StrictExchange
from .devices import present_stream
from .run import Run
from .runnable import Runnable

T = TypeVar("T")
Tangents = dict[int, Tensor] | None
Inputs = Callable[[int, fx.GraphModule], dict[str, Any]]  # of a worker's program
THREADS = 4096  # workers of one process


class Threads:
    """All workers as threads of this process, which share its parameters.

    ordered: whether messages are matched by their order, as between GPUs.
    share: whether workers share torch's intra-op threads, instead of having as many
        each, which bits depend on.
    """

    readers: tuple[int, ...] | None = (0,)

    def __init__(self, workers: int, ordered: bool = False, share: bool = True) -> None:
        if workers > THREADS:
            raise PlanError(
                f"a process runs at most {THREADS:,} workers as threads, and the "
                f"schedule has {workers:,}; fxsched.plan and fxsched.simulate take more"
            )
        self.here: Sequence[int] = range(workers)
        self.ordered = ordered
        self.ways: set[Way] = set()  # that plans use
        self.closed = False
        self.busy = threading.Lock()  # runs that share the threads take turns
        count = max(1, torch.get_num_threads() // (workers if share else 1))
        self.pool = ThreadPoolExecutor(
            workers, "fxsched", initializer=torch.set_num_threads, initargs=(count,)
        )

    def close(self) -> None:
        """Ends the threads."""
        self.pool.shutdown(wait=False)
        self.closed = True

    def skips(self, gradients: Gradients) -> bool:
        """False: one scaler sees all gradients."""
        return False

    def differ(self, number: int) -> bool:
        """False: threads share one generator."""
        return False

    def first(self, number: int) -> int:
        """The number itself, for the same reason."""
        return number

    def settle(self, plan: Plan, args: Sequence[Any]) -> bool:
        """Makes what isn't made yet of the parameters and buffers; True.

        Raises PlanError for what this rank gave up: threads share all.
        """
        if any(isinstance(a, Tensor) and is_given_up(a) for a in args):
            raise PlanError(
                "the model was trained on ranks, each of which keeps a part of it, and "
                "this backend runs on threads; take transport='distributed', or load "
                "fxsched.full_state_dict(model) into a new model"
            )
        make_all(args)
        return True

    def check(self, plan: Plan) -> None:
        """Raises CheckError unless the programs of all workers are sound."""
        plan.check()
        self.ways |= plan.step.ways if self.ordered else set()

    def guarded(self) -> AbstractContextManager[None]:
        """Where what fails is told to other processes, of which there are none."""
        return nullcontext()

    def start(self, programs: dict[int, Runnable], inputs: Inputs) -> list[Run]:
        """A run of each worker's program, begun."""
        exchange = Exchange()
        if self.ordered:
            exchange = StrictExchange(len(programs), open=self.ways)
        return [
            each.begin(
                worker, inputs(worker, each.program.gm), exchange.endpoint(worker)
            )
            for worker, each in programs.items()
        ]

    def advance(self, runs: list[Run], tangents: Tangents) -> list[dict[str, Any]]:
        """Runs all workers up to their pause or end. If one fails, all stop."""

        def guarded(run: Run) -> dict[str, Any]:
            try:
                with stream():
                    return run.advance(tangents)
            except BaseException:
                exchange.abort()
                raise

        if self.closed:
            raise PlanError(
                "the backend was closed between the call and its backward(); close it "
                "after backward()"
            )
        endpoint = runs[0].endpoint
        assert isinstance(endpoint, ThreadEndpoint | StrictEndpoint)
        exchange = endpoint.exchange
        stream = present_stream(runs[0].device)
        with self.busy:
            futures = [self.pool.submit(guarded, run) for run in runs]
            try:
                errors = [future.exception() for future in futures]
            except BaseException:  # interrupted: no thread may go on waiting
                exchange.abort()
                raise
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, Aborted)):
            raise error
        return [future.result() for future in futures]

    def together(self) -> float:
        """The time, on the clock of the events."""
        return time.perf_counter()

    def gather(self, events: list[T]) -> list[T]:
        """The events, or the like, of all workers."""
        return events
