"""The flight record: the last calls of a backend, written when one fails."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from ..transport.endpoints import Aborted
from .ranks import Ranks
from .record import Entry, Heard, Report, put_away, write_record
from .run import Run
from .run_record import RunRecord
from .threads import Threads

CALLS = 3  # that are kept
WAITS = (ConnectionError, TimeoutError, Aborted)  # errors that others are the cause of


class Recorder:
    """Keeps the records of the runs of the last CALLS calls.

    folder: where they are written to, a file a rank, or worker.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: deque[tuple[int, list[RunRecord]]] = deque(maxlen=CALLS)
        self.begun = 0

    def start(self, workers: Threads | Ranks) -> None:
        """Puts away what an earlier start left. Raises OSError."""
        self.calls.clear()
        count = len(workers.here)
        if isinstance(workers, Ranks):
            count = workers.processes.workers
        with workers.guarded():
            put_away(self.folder, workers.here, count)

    def begin(self, runs: list[Run], workers: Threads | Ranks) -> None:
        """Notes the runs of a call."""
        self.begun += 1
        call = self.begun
        if isinstance(workers, Ranks):
            call = workers.processes.control.calls
        records = [run.record for run in runs if run.record is not None]
        self.calls.append((call, records))

    def write(self, error: BaseException, workers: Threads | Ranks) -> None:
        """Writes a file for each worker here, unless this error has been written; the
        error says so. What keeps it from that is said there as well."""
        told = f"fxsched: flight record of the last {CALLS} calls: "
        if any(note.startswith(told) for note in getattr(error, "__notes__", ())):
            return
        try:
            for worker in workers.here:
                self._write(worker, error, workers)
        except OSError as problem:
            error.add_note(f"{told}not written, {problem}")
        else:
            error.add_note(f"{told}fxsched blame {self.folder}")
        self.calls.clear()

    def _write(
        self, worker: int, error: BaseException, workers: Threads | Ranks
    ) -> None:
        shift = time.time() - time.perf_counter()
        entries: list[Entry] = []
        for call, records in self.calls:
            for record in records:
                if record.worker == worker:
                    entries += record.entries(call, shift)
        entries.sort(key=lambda entry: entry.end)
        write_record(self.folder, self._report(worker, error, workers), entries)

    def _report(
        self, worker: int, error: BaseException, workers: Threads | Ranks
    ) -> Report:
        call, records = self.calls[-1] if self.calls else (self.begun, [])
        record = next((r for r in records if r.worker == worker), None)
        failed = [r for _, runs in self.calls for r in runs if r.error]
        said = f"{type(error).__name__}: {error}"
        own, count = not isinstance(error, WAITS), len(workers.here)
        heard: tuple[Heard, ...] = ()
        whom = None
        if isinstance(workers, Ranks):
            control = workers.processes.control
            call, count = control.calls, control.ranks
            heard = tuple(Heard(*each) for each in control.detector.said())
            whom = control.whom if isinstance(error, TimeoutError) else None
        elif failed and (record is None or record.error != said):
            own, said = False, "another worker failed"
        job = waited = None
        if record is not None:
            peer, task = record.waiting()
            job, whom = record.task or task, whom if peer is None else peer
            if record.wait is not None:
                waited = time.perf_counter() - record.wait.began
        now = time.time()
        whom = None if own else whom
        args = (now, call, said, own, job or "", whom, waited or 0.0, heard)
        return Report(worker, count, *args)
