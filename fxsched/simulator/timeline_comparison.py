"""Where two timelines of the same jobs part, such as a predicted and a measured one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from ..clock.timeline import Event
from ..draw import tables
from ..draw.palette import Clock, clock
from ..jobs.job import Direction, Job, PlanError

ROWS, KINDS = 5, 8  # of a table, and of that of durations, at most


class Deviation(NamedTuple):
    """The same thing, predicted and measured."""

    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """How many times as much was measured; nan if nothing was predicted."""
        return self.measured / self.predicted if self.predicted else math.nan

    def cells(self, time: Clock) -> tuple[str, str, str]:
        """Predicted, measured and their ratio, for a table."""
        ratio = f"{self.ratio:.2f}" if self.predicted else ""
        a, b = (f"{value * time.factor:.4g}" for value in self)
        return a, b, ratio


Key = tuple[Job, int | None]


def _key(event: Event) -> Key:
    """What tells the jobs of a step apart: several workers may run one U."""
    updates = event.job.direction is Direction.UPDATE
    return event.job, event.worker if updates else None


class Timing:
    """A timeline by worker, and how long each worker waited before each job."""

    def __init__(self, events: Sequence[Event], name: str) -> None:
        self.events = {_key(event): event for event in events}
        if len(self.events) < len(events):
            counts = Counter(map(_key, events))
            twice = next(key for key, count in counts.items() if count > 1)[0]
            raise PlanError(f"{name}: {twice} ran twice; give the events of one step")
        self.begin = min((event.start for event in events), default=0.0)
        self.step = max((event.end for event in events), default=0.0) - self.begin
        self.order: dict[int, list[Job]] = {}
        self.wait: dict[Key, float] = {}
        free: dict[int, float] = {}
        for event in sorted(events, key=lambda e: (e.start, e.end)):
            job, worker, start, end = event
            self.order.setdefault(worker, []).append(job)
            before = free.get(worker, self.begin)
            wait = start - before
            self.wait[_key(event)] = (
                wait if wait > 1e-9 * self.step else 0.0
            )  # but rounding
            free[worker] = max(end, before)


def compare_timelines(
    predicted: Sequence[Event], measured: Sequence[Event], unit: str = "s"
) -> str:
    """Tables that fit a screen: how long the steps take; on which workers the order of
    jobs differs, and from where on; which stages take longer than predicted; before
    which jobs workers wait longer.

    unit: of both timelines' times; seconds are shown as ms or µs where that suits.
    Raises PlanError for timelines of different jobs, or of other workers' jobs.
    """
    a, b = Timing(predicted, "predicted"), Timing(measured, "measured")
    _check(a, b)
    if not a.events:
        return "no jobs"
    time = clock(max(a.step, b.step), unit)
    step = Deviation(a.step, b.step)
    ratio = f", {step.ratio:.2f} times as long" if step.predicted else ""
    parts = (
        f"from the first job to the last: predicted {time.text(a.step)}, measured "
        f"{time.text(b.step)}{ratio}",
        _orders(a, b),
        _durations(a, b, time),
        _waits(a, b, time),
    )
    return "\n\n".join(parts)


def _check(a: Timing, b: Timing) -> None:
    for one, other, names in (
        (a, b, "predicted|measured"),
        (b, a, "measured|predicted"),
    ):
        has, lacks = names.split("|")
        for key in one.events:
            if key not in other.events:
                job = key[0]
                raise PlanError(
                    f"{job} is in the {has} timeline and not in the {lacks} one; "
                    "compare timelines of the same jobs"
                )
    for (job, _), event in a.events.items():
        other_worker = b.events[_key(event)].worker
        if event.worker != other_worker:
            raise PlanError(
                f"{job} is predicted on worker {event.worker} and was measured on "
                f"worker {other_worker}; compare timelines of the same schedule"
            )


def _orders(a: Timing, b: Timing) -> str:
    """For each worker the first job that another one was measured in place of."""
    same, rows = [], []
    for worker, order in sorted(a.order.items()):
        pairs = enumerate(zip(order, b.order[worker], strict=True))
        first = next(((worker, i, p, m) for i, (p, m) in pairs if p != m), None)
        if first is None:
            same.append(worker)
        else:
            rows.append(first)
    if not rows:
        return "order of jobs: the same on every worker"
    line = "order of jobs: differs on every worker"
    if same:
        line = f"order of jobs: the same on workers {tables.ranges(same)}; differs on"
    headers = "worker|at job|predicted|measured"
    more = f"\nand {len(rows) - ROWS} more" if len(rows) > ROWS else ""
    return _table(line, headers, rows[:ROWS]) + more


def _durations(a: Timing, b: Timing, time: Clock) -> str:
    """Medians by stage and direction; if there are many, of those that matter most."""
    times: dict[tuple[int, str], tuple[list[float], list[float]]] = {}
    for i, timing in enumerate((a, b)):
        for job, _, start, end in timing.events.values():
            kind = job.stage, str(job.direction)
            times.setdefault(kind, ([], []))[i].append(end - start)
    medians = {kind: Deviation(median(p), median(m)) for kind, (p, m) in times.items()}

    def matters(kind: tuple[int, str]) -> float:
        """Of the time of all its jobs, what was not predicted."""
        pair = medians[kind]
        return -abs(pair.measured - pair.predicted) * len(times[kind][0])

    shown = sorted(sorted(sorted(medians), key=matters)[:KINDS])
    rows = [(s, d, *medians[s, d].cells(time)) for s, d in shown]
    line = f"durations of jobs, medians{_in(time)}"
    if len(medians) > KINDS:
        line += f", where they differ most ({KINDS} of {len(medians)})"
    headers = "stage|direction|predicted|measured|ratio"
    return _table(line, headers, rows)


def _waits(a: Timing, b: Timing, time: Clock) -> str:
    """How long a worker is idle before a job, where that differs most."""
    more = {key: b.wait[key] - a.wait[key] for key in a.events}
    shown = sorted(more, key=lambda key: -abs(more[key]))[:ROWS]
    rows = [
        (
            a.events[key].worker,
            key[0],
            *Deviation(a.wait[key], b.wait[key]).cells(time)[:2],
        )
        for key in shown
        if abs(more[key]) > 1e-9 * b.step
    ]
    if not rows:
        return "waits between jobs: the same"
    line = f"waits that differ most{_in(time)}"
    headers = "worker|before job|predicted|measured"
    return _table(line, headers, rows)


def _in(time: Clock) -> str:
    return f" in {time.unit}" if time.unit else ""


def _table(line: str, headers: str, rows: Sequence[Sequence[object]]) -> str:
    return f"{line}\n\n{tables.table(headers, rows, 'r')}"
