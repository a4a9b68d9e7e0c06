"""Runs a worker's tasks in the order in which inputs arrive and n says.

Of the tasks whose inputs are there, the one with the smallest n runs, as a function of
its own.
"""

from __future__ import annotations

import heapq
import queue
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from ..ir.graphs import arguments, result
from ..transport.endpoints import Aborted, Endpoint
from ..transport.processes import WATCHERS
from .device_graphs import DeviceGraphs
from .profiler_ranges import close_range, open_range
from .run import Run
from .run_record import RunRecord
from .static_program import task_function
from .tasks import Receive, Task, TaskProgram


class TaskFunctions:
    """A worker's program as a function for each of its tasks.

    run: the functions, by id of their tasks.
    readers: how many tasks read each slot.
    """

    def __init__(
        self,
        program: TaskProgram,
        record: bool,
        prefetch: int,
        graphs: DeviceGraphs | None = None,
    ) -> None:
        self.program, self.record, self.prefetch = program, record, prefetch
        self.readers, shared = _readers(program)
        self.run = {
            id(task): task_function(program, task, shared, graphs)
            for phase in program.phases
            for task in phase
        }


def _readers(program: TaskProgram) -> tuple[dict[int, int], set[fx.Node]]:
    """How many tasks read each slot, since "dynamic" can't know the last; and the
    values that more than their own task read."""
    count: dict[int, int] = {}
    for phase in program.phases:
        for task in phase:
            for slot in task.needs:
                count[slot] = count.get(slot, 0) + 1
    for value in program.gm.graph.output_node().all_input_nodes:
        count[program.slots[value]] = count.get(program.slots[value], 0) + 1
    return count, {n for n, slot in program.slots.items() if slot in count}


class Dynamic(Run):
    """A step in the order in which inputs arrive and n says."""

    def __init__(
        self,
        runnable: TaskFunctions,
        worker: int,
        inputs: dict[str, Any],
        endpoint: Endpoint,
        record: RunRecord | None,
    ) -> None:
        super().__init__(worker, inputs, endpoint, record, runnable.record)
        self.runnable, self.program = runnable, runnable.program
        self.receives = self.program.receives
        self.values: list[Any] = [None] * len(self.program.slots)
        for node in self.program.gm.graph.find_nodes(op="placeholder"):
            self.values[self.program.slots[node]] = inputs[node.name]
        self.phase = 0
        self.asked = dict.fromkeys(self.program.lanes, 0)  # receives posted so far
        self.posted = dict.fromkeys(self.program.lanes, 0)  # receives on their way
        self.fetched = 0  # tasks' fetches posted so far
        self.held: dict[int, int] = {}  # weights on their way or here: slot to batch
        self.readers = dict(runnable.readers)
        self.coming = dict(self.program.receive_at)  # not received yet, by slot

    def go_on(self, tangents: dict[int, Tensor] | None) -> dict[str, Any]:
        """Runs the tasks of one phase; what the program gives at its end."""
        phases = self.program.phases
        if tangents is not None:
            (pause,) = (t.pause for t in phases[self.phase - 1] if t.pause)
            self.values[self.program.slots[pause]] = tangents
        tasks = phases[self.phase]
        self._dynamic(tasks)
        self.phase += 1
        if self.phase < len(phases):
            (pause,) = (t.pause for t in tasks if t.pause)
            results = arguments(pause)[0]
        else:
            results = result(self.program.gm)
        returned: dict[str, Any] = fx.map_arg(
            results, lambda n: self.values[self.program.slots[n]]
        )
        if self.phase == len(phases):
            self.values = []  # else they would hold what is returned
        return returned

    def where(self) -> tuple[int | None, str]:
        """The peer and the job of the first task that waits for a receive."""
        coming = self._coming()
        waiting = [
            (task.n, task.name, coming[slot].parcel.peer)
            for task in self.program.phases[self.phase]
            for slot in task.needs
            if slot in coming
        ]
        if not waiting:
            return None, ""
        _, name, peer = min(waiting)
        return peer, f"job {name}"

    def _coming(self) -> dict[int, Receive]:
        """What this phase still has to receive, by slot."""
        return {s: r for s, r in self.coming.items() if r.phase == self.phase}

    def _ask(self, most: int, arrived: queue.SimpleQueue[int]) -> None:
        """Posts receives of this phase in the program's order, so that at most so many
        of a lane are on their way; fetches while there is room for weights."""
        for lane, receives in self.program.lanes.items():
            while self.asked[lane] < len(receives) and self.posted[lane] < most:
                receive = receives[self.asked[lane]]
                if receive.phase != self.phase:
                    break
                if not receive.parcel.weights:
                    self._post(receive, arrived)
                self.asked[lane] += 1
        batches = self.program.fetches
        while self.fetched < len(batches) and self._has_room():
            batch = batches[self.fetched]
            if batch[0].phase != self.phase:
                break
            for receive in batch:
                self.held[receive.slot] = self.fetched
                self._post(receive, arrived)
            self.fetched += 1

    def _has_room(self) -> bool:
        """Whether the next tasks' fetches may be posted: whether those of no more than
        `prefetch` others are here, besides what that task reads too."""
        if not self.held:
            return True
        needs = self.program.fetchers[self.fetched].needs
        others = {batch for slot, batch in self.held.items() if slot not in needs}
        return len(others) <= self.runnable.prefetch

    def _post(self, receive: Receive, arrived: queue.SimpleQueue[int]) -> None:
        self.posted[receive.lane] += 1
        self.wire.expect(receive.parcel)
        self.wire.watch(receive.parcel, arrived)

    def _execute(self, task: Task) -> None:
        job = task.job if self.runnable.record else None
        ranged = None if job is None else open_range(str(job))
        start = None if job is None else self.clock()
        try:
            self.runnable.run[id(task)](self.values, self.wire.send)
        except Exception as error:
            self.culprit(error, self.program.gm, task)
            raise
        finally:
            close_range(ranged)
        if job is not None:
            self.log(job, start, self.clock())

    def _dynamic(self, tasks: Sequence[Task]) -> None:
        arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        by_tag = {r.parcel.tag: r for r in self.receives}
        missing, waiting = self._missing(tasks)
        ready = [(t.n, i) for i, t in enumerate(tasks) if not missing[i]]
        heapq.heapify(ready)

        def there(slots: Sequence[int]) -> None:
            for slot in slots:
                for i in waiting.pop(slot, ()):
                    missing[i] -= 1
                    if not missing[i]:
                        heapq.heappush(ready, (tasks[i].n, i))

        self._ask(WATCHERS, arrived)
        left, incoming = len(tasks), len(self._coming())
        while left or incoming:
            if incoming and (not ready or not arrived.empty()):
                tag = self.wire.next(arrived, self.where)
                if tag < 0:
                    raise Aborted
                receive = by_tag[tag]
                self.values[receive.slot] = self.wire.take(receive.parcel)
                del self.coming[receive.slot]
                there([receive.slot])
                incoming -= 1
                self.posted[receive.lane] -= 1
                self._ask(WATCHERS, arrived)
            else:
                task = tasks[heapq.heappop(ready)[1]]
                self._execute(task)
                left -= 1
                if self._release(task):
                    self._ask(WATCHERS, arrived)
                there(task.makes)

    def _missing(self, tasks: Sequence[Task]) -> tuple[list[int], dict[int, list[int]]]:
        """For each task how many values it waits for; for each value, the tasks."""
        position = {slot for task in tasks for slot in task.makes}
        waiting: dict[int, list[int]] = {}
        missing = []
        for i, task in enumerate(tasks):
            slots = [s for s in task.needs if s in position or s in self.coming]
            if task.pause is not None:  # the call ends when all of its tasks have run
                slots = sorted({*slots, *position} - set(task.makes))
            missing.append(len(slots))
            for slot in slots:
                waiting.setdefault(slot, []).append(i)
        return missing, waiting

    def _release(self, task: Task) -> bool:
        """Lets go of what none of the tasks after this reads; whether there may be room
        for more weights now."""
        if task.pause is not None:  # its values are about to be handed out
            return False
        before = len(self.held)
        for slot in task.needs:
            self.readers[slot] -= 1
            if not self.readers[slot]:
                self.values[slot] = None
                self.held.pop(slot, None)
        for slot in task.makes:
            if not self.readers.get(slot):
                self.values[slot] = None
        return len(self.held) < before
