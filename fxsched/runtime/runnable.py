"""Runs one worker's program over an endpoint.

"static" runs its tasks in the program's order, all as one function; "dynamic" runs, of
those whose inputs are there, the one with the smallest n, as a function of its own.
"""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any

from torch import Tensor, fx

from ..ir.request import Order
from ..transport.endpoints import Aborted, Endpoint
from ..transport.lane import Lane
from .device_graphs import DeviceGraphs
from .dynamic_run import Dynamic, TaskFunctions
from .run import Run
from .run_record import RunRecord
from .static_program import Steps, Straight
from .tasks import TaskProgram


class Runnable:
    """A worker's fx program, made ready to run any number of times.

    record: whether its runs note when each job started and ended.
    prefetch: for how many tasks ahead it asks for weights.
    flight: whether runs have a record of jobs and messages.
    ordered: see Straight; of order "static" only.
    graphs: captures stages, if they are.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        order: Order,
        record: bool = False,
        prefetch: int = 1,
        flight: bool = False,
        ordered: bool = False,
        graphs: DeviceGraphs | None = None,
    ) -> None:
        self.program, self.flight = TaskProgram(gm), flight
        self.code: Straight | TaskFunctions
        record |= flight
        if order == "static":
            self.code = Straight(self.program, record, prefetch, ordered, graphs)
        else:
            self.code = TaskFunctions(self.program, record, prefetch, graphs)

    def begin(self, worker: int, inputs: dict[str, Any], endpoint: Endpoint) -> Run:
        """A step of the program, from the inputs of its graph by name."""
        record = RunRecord(worker, self.program) if self.flight else None
        if isinstance(self.code, Straight):
            return Static(self.code, worker, inputs, endpoint, record)
        return Dynamic(self.code, worker, inputs, endpoint, record)


class Static(Run):
    """A step in the program's own order."""

    def __init__(
        self,
        straight: Straight,
        worker: int,
        inputs: dict[str, Any],
        endpoint: Endpoint,
        record: RunRecord | None,
    ) -> None:
        super().__init__(worker, inputs, endpoint, record, straight.record)
        self.straight = straight
        self.left = len(straight.program.phases)
        self.lanes = [Lane(endpoint.fail) for _ in straight.lanes]
        if self.lanes:
            endpoint.share()
        wire, calls = self.wire, [lane.call for lane in self.lanes]
        self.steps: Steps = straight.run(
            inputs, wire.send, wire.expect, wire.take, self.clock, self.log, *calls
        )

    def where(self) -> tuple[int | None, str]:
        """The job whose line the generator stands at."""
        for lane in self.lanes:
            if threading.get_ident() == lane.thread:
                return None, f"job {lane.task}"
        frame: FrameType | None = getattr(self.steps, "gi_frame", None)
        task = self.straight.tasks[frame.f_lineno - 2] if frame else ""
        return None, f"job {task}" if task else ""

    def go_on(self, tangents: dict[int, Tensor] | None) -> dict[str, Any]:
        """Resumes the generator up to its next pause."""
        try:
            results = self.steps.send(tangents)
            for lane in self.lanes:
                lane.finish()
            self.left -= 1
            if not self.left:
                self.steps.close()  # else its variables would hold what it returned
            return results
        except Exception as error:
            for lane in self.lanes:
                if lane.error is not None and not isinstance(lane.error, Aborted):
                    self._blame(lane.task, lane.error)
                    raise lane.error from None
            self._blame(self.straight.task_of(error), error)
            raise

    def _blame(self, name: str | None, error: BaseException) -> None:
        """Notes in which task an error was raised."""
        if name and isinstance(error, Exception) and not isinstance(error, Aborted):
            program = self.straight.program
            tasks = (task for phase in program.phases for task in phase)
            task = next(task for task in tasks if task.name == name)
            self.culprit(error, program.gm, task)
