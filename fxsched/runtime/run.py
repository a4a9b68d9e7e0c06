"""One step of a worker's program over an endpoint, in whatever order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx

from ..clock.timeline import Event
from ..ir.modes import casts
from ..jobs.job import Job
from ..transport.endpoints import Endpoint
from .culprit import add_culprit
from .data_stack import call_with_room
from .devices import Clock, DeviceClock, device_of
from .run_record import RecordedEndpoint, RunRecord
from .tasks import Task


class Run(ABC):
    """One step of a program.

    events: the jobs that ran, with times of time.perf_counter, if the program records.
    told: how many of them the step has. record: for the flight record, if there is one.
    wire: what messages go through. device: that of the inputs, None for the CPU.
    clock: says now, or marks it on the device, if the program records.
    """

    def __init__(
        self,
        worker: int,
        inputs: dict[str, Any],
        endpoint: Endpoint,
        record: RunRecord | None,
        timed: bool,
    ) -> None:
        self.worker, self.endpoint, self.record = worker, endpoint, record
        self.device = device_of(inputs.values())
        self.clock: Clock = perf_counter
        if timed and self.device is not None:
            self.clock = DeviceClock(self.device)
        self.events: list[Event] = [] if record is None else record.events
        self.told = 0
        self.inference = torch.is_inference_mode_enabled()  # in the caller's thread
        self.wire = endpoint
        if record is not None:
            self.wire = RecordedEndpoint(endpoint, record)

    def advance(self, tangents: dict[int, Tensor] | None = None) -> dict[str, Any]:
        """Runs up to the pause, or to the end; returns what the program gives there."""
        with ExitStack() as modes:  # stage graphs hold all casts already
            modes.enter_context(torch.inference_mode(self.inference))
            modes.enter_context(torch.no_grad())
            for kind, _ in casts():
                modes.enter_context(torch.autocast(kind, enabled=False))
            try:
                results = call_with_room(self.go_on, tangents)
            except BaseException as error:
                if self.record is not None:
                    self.record.error = f"{type(error).__name__}: {error}"
                raise
        self.endpoint.finish()
        if isinstance(clock := self.clock, DeviceClock):
            self.events[self.told :] = [
                Event(job, worker, clock.seconds(start), clock.seconds(end))
                for job, worker, start, end in self.events[self.told :]
            ]
        return results

    @abstractmethod
    def go_on(self, tangents: dict[int, Tensor] | None) -> dict[str, Any]:
        """What `advance` does, in the modes that it sets."""

    def where(self) -> tuple[int | None, str]:
        """The worker, if it is known, and the job that this run waits for."""
        return None, ""

    def culprit(self, error: Exception, gm: fx.GraphModule, task: Task) -> None:
        """Notes in which task an error came up, also on the error."""
        if self.record is not None:
            self.record.task = task.name
        add_culprit(error, self.worker, gm, task)

    def log(self, job: Job, start: Any, end: Any) -> None:
        """Notes when a job ran, as `clock` says."""
        self.events.append(Event(job, self.worker, start, end))
