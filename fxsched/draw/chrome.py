"""Writes timelines as a trace for ui.perfetto.dev (Trace Event Format)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from ..clock.timeline import Event
from ..jobs.job import Direction, PlanError, whole_stage
from ..jobs.user_values import is_number

# Category and chrome://tracing's name of a colour; Perfetto colours by the job's name.
LOOKS = {
    Direction.FORWARD: ("forward", "thread_state_runnable"),
    Direction.BACKWARD: ("backward", "thread_state_running"),
    Direction.WEIGHT: ("weights", "thread_state_iowait"),
    Direction.UPDATE: ("update", "rail_response"),
}


def write_trace(
    path: str | PathLike[str],
    timelines: Mapping[str, Sequence[Event]],
    scale: float = 1e6,
) -> None:
    """Writes timelines into one trace file, for Perfetto or chrome://tracing.

    Each timeline is a process, and each worker a thread of it. All timelines begin at 0
    with their first job, so that you can compare predicted and measured steps.

    path: a file .json or .json.gz; the viewers read both.
    timelines: timelines by name, as {"measured": backend.timeline}.
    scale: how many microseconds one unit of the times is: 1e6 for seconds. With 1e3, a
        unit of a simulation without seconds is shown as a millisecond.
    Raises PlanError for a scale that isn't above 0.
    """
    if not is_number(scale) or scale == 0:
        raise PlanError(f"write_trace(scale={scale!r}): give a number above 0")
    if not isinstance(timelines, Mapping) or not all(
        isinstance(events, Sequence) for events in timelines.values()
    ):
        raise PlanError(
            f"write_trace(timelines={timelines!r}): give timelines by name, as "
            '{"measured": backend.timeline}'
        )
    path = fspath(path)
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for i, record in enumerate(_records(timelines, scale)):
            file.write(",\n" if i else "")
            file.write(json.dumps(record, separators=(",", ":")))
        file.write("\n]}\n")


def _records(
    timelines: Mapping[str, Sequence[Event]], scale: float
) -> Iterator[dict[str, Any]]:
    # Perfetto takes process 0 for the idle one
    for process, (name, events) in enumerate(timelines.items(), 1):
        yield from _name("process", process, 0, name, process)
        for worker in sorted({event.worker for event in events}):
            yield from _name("thread", process, worker, f"worker {worker}", worker)
        begin = min((event.start for event in events), default=0.0)
        for event in events:
            yield _slice(event, process, begin, scale)


def _name(
    kind: str, process: int, thread: int, name: str, position: int
) -> Iterator[dict[str, Any]]:
    """Says what a process or a thread is called, and where it is shown."""
    place = {"pid": process, "tid": thread}
    for what, value in (("name", name), ("sort_index", position)):
        yield {"ph": "M", "name": f"{kind}_{what}", **place, "args": {what: value}}


def _slice(event: Event, process: int, begin: float, scale: float) -> dict[str, Any]:
    job, worker, start, end = event
    category, colour = LOOKS[job.direction]
    return {
        "ph": "X",
        "name": str(job),
        "cat": category,
        "pid": process,
        "tid": worker,
        "ts": _short((start - begin) * scale),
        "dur": _short((end - start) * scale),
        "cname": colour,
        "args": {
            "stage": whole_stage(job.stage),
            "microbatch": "*" if job.joint else job.microbatch,
            "direction": str(job.direction),
        },
    }


def _short(microseconds: float) -> float:
    """To the nanosecond, as the viewers keep it."""
    return round(microseconds, 3)
