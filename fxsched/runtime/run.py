"""One step of a worker's program over an endpoint, in whatever order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ..clock.timeline import Event
from ..jobs.job import Job
from ..transport.endpoints import Endpoint


class Run(ABC):
    """One step of a program.

    events: the jobs that ran, with times of time.perf_counter, if the program records.
    """

    def __init__(self, worker: int, endpoint: Endpoint) -> None:
        self.worker, self.endpoint = worker, endpoint
        self.events: list[Event] = []

    def advance(self, tangents: dict[int, Tensor] | None = None) -> dict[str, Any]:
        """Runs up to the pause, or to the end; returns what the program gives there."""
        with ExitStack() as modes:  # stage graphs hold all casts already
            modes.enter_context(torch.no_grad())
            for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                modes.enter_context(torch.autocast(kind, enabled=False))
            results = self.go_on(tangents)
        self.endpoint.finish()
        return results

    @abstractmethod
    def go_on(self, tangents: dict[int, Tensor] | None) -> dict[str, Any]:
        """What `advance` does, in the modes that it sets."""

    def where(self) -> tuple[int | None, str]:
        """The worker, if it is known, and the job that this run waits for."""
        return None, ""

    def log(self, job: Job, start: float, end: float) -> None:
        """Notes when a job ran."""
        self.events.append(Event(job, self.worker, start, end))
