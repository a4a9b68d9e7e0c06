"""Timelines as columns, and what pictures of them need: averages, memory, labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..clock.timeline import Event
from ..jobs.job import Direction, PlanError, whole_stage

if TYPE_CHECKING:  # it needs torch, and pictures don't
    from ..accounts.held import During

Array = np.ndarray[Any, np.dtype[Any]]
LETTERS = "".join(map(str, Direction))
NAMES = ("forward", "backward", "gradients of weights", "update")


@dataclass(frozen=True, eq=False)
class Bars:
    """Jobs that ran, as arrays of one length, sorted by worker, then start.

    microbatch: 0 for the jobs of global-batch stages, on all rows.
    direction: positions in LETTERS: 0 for F, 1 for B, 2 for W, 3 for U.
    named: the stage of the model; `stage` may be a piece of a shard of it.
    start, end: from the beginning of the step, which takes `span`.
    """

    workers: int
    span: float
    stage: Array
    microbatch: Array
    direction: Array
    worker: Array
    start: Array
    end: Array
    joint: Array
    named: Array

    def __len__(self) -> int:
        return len(self.stage)

    @property
    def microbatches(self) -> int:
        """How many microbatches there are."""
        return int(self.microbatch.max(initial=-1)) + 1

    @property
    def colour(self) -> Array:
        """Each job's row of a palette: its microbatch, or one after all of them."""
        rows: Array = np.where(self.joint, self.microbatches, self.microbatch)
        return rows

    @property
    def meets(self) -> bool:
        """Whether any job is on the rows of all microbatches."""
        return bool(self.joint.any())

    @property
    def sample(self) -> int:
        """The row of a palette that shows directions: grey if that's all there is."""
        return self.microbatches if len(self) and self.joint.all() else 0

    def name(self, i: int) -> str:
        """A job, as 2F0, or 2F* if it is on all rows."""
        return "".join(self.parts(i))

    def parts(self, i: int) -> tuple[str, str]:
        """The stage of a job's name, and the rest: direction and microbatch."""
        rows = "*" if self.joint[i] else self.microbatch[i]
        return str(self.named[i]), f"{LETTERS[self.direction[i]]}{rows}"

    @property
    def bubble(self) -> float:
        """The share of the workers' time that they are idle."""
        busy = float((self.end - self.start).sum())
        return 1.0 - busy / (self.span * self.workers) if self.span else 0.0

    def usual_least(self, values: Array) -> float:
        """The least of the directions' medians; updates, which are short, aside."""
        several = [d for d in self.directions if LETTERS[d] != "U"] or self.directions
        medians = (float(np.median(values[self.direction == d])) for d in several)
        return min(medians, default=0.0)

    @property
    def directions(self) -> list[int]:
        """Those that there are jobs of."""
        return [int(d) for d in np.unique(self.direction)]


def bars_of(
    events: Sequence[Event],
    workers: int,
    step: tuple[float, float] | None = None,
) -> Bars:
    """The columns of a timeline.

    step: when the step began and ended; the first start and the last end unless given.
    Raises PlanError for workers that there aren't, and times that don't make sense.
    """
    if workers < 1:
        raise PlanError(f"a diagram of {workers} workers: give 1 or more")
    letter = {d: i for i, d in enumerate(Direction)}
    rows = [(*e.job[:2], letter[e.job.direction], *e[1:]) for e in events]
    table = np.array(rows, float).reshape(len(rows), 6)
    _check(events, workers, table)
    begin = min(table[:, 4], default=0.0) if step is None else step[0]
    end = max(table[:, 5], default=0.0) if step is None else step[1]
    joint = np.array([e.job.joint for e in events], bool)
    named = np.array([whole_stage(e.job.stage) for e in events], int)
    by_worker = np.lexsort((table[:, 5], table[:, 4], table[:, 3]))
    table, joint, named = table[by_worker], joint[by_worker], named[by_worker]
    stage, microbatch, direction, worker = table[:, :4].astype(int).T
    start, finish = (table[:, 4:] - begin).T
    span = max(float(end - begin), 0.0)
    where = stage, microbatch, direction, worker
    return Bars(workers, span, *where, start, finish, joint, named)


def _check(events: Sequence[Event], workers: int, table: Array) -> None:
    worker, start, end = table[:, 3], table[:, 4], table[:, 5]
    for i in np.flatnonzero((worker < 0) | (worker >= workers))[:1]:
        raise PlanError(
            f"{events[i].job} ran on worker {events[i].worker}, but workers are "
            f"0..{workers - 1}; give a timeline of this schedule"
        )
    for i in np.flatnonzero(~((start <= end) & (end - start < np.inf)))[:1]:
        raise PlanError(
            f"{events[i].job} runs from {events[i].start!r} to {events[i].end!r}; give "
            "an end that is not before the start"
        )


class Labels(NamedTuple):
    """What is written on jobs; "" where there is no room for it.

    least, whole: how many characters the usual job of the shortest direction has to
        have for F0 (forward of microbatch 0) to be shown, and for 2F0 (of stage 2).
    room: how many it has.
    """

    texts: list[str]
    least: int
    whole: int
    room: float

    @staticmethod
    def of(bars: Bars, room: Array, gap: int = 0) -> Labels:
        """Labels of jobs: one form for all, so that no row has some of each.

        room: of each job, in characters. gap: how many stay free after a whole name.
        """
        names = [bars.name(i) for i in range(len(bars))]
        short = [bars.parts(i)[1] for i in range(len(bars))]
        least = max(map(len, short), default=0)
        whole = max(map(len, names), default=0) + gap
        usual = bars.usual_least(room)
        chosen = zip(names if usual >= whole else short, room.tolist(), strict=True)
        texts = [text if len(text) <= space else "" for text, space in chosen]
        return Labels(texts, least, whole, usual)


def cell_means(bars: Bars, values: Array, rows: int, columns: int) -> Array:
    """Means of jobs' values over the cells of a picture, as (rows, columns, values).

    A cell is an equal part of the workers high and of the step wide. Idle time is 0.
    values: (jobs, values).
    """
    width = columns + 2
    count = values.shape[1]
    out = np.zeros((count, rows * width))
    row = bars.worker * rows // bars.workers
    # A job adds its value from its start on, and takes it away from its end on. The
    # cell of an edge gets the part that is left of it, the next one the rest.
    for edge, sign in ((bars.start, 1.0), (bars.end, -1.0)):
        x = np.clip(edge * (columns / (bars.span or 1.0)), 0, columns)
        cell = x.astype(int)
        part = x - cell
        at = row * width + cell
        for i in range(count):
            add = sign * values[:, i]
            out[i] += np.bincount(at, add * (1 - part), rows * width)
            out[i] += np.bincount(at + 1, add * part, rows * width)
    means = out.reshape(count, rows, width).cumsum(2)[:, :, :columns]
    sharing = np.bincount(np.arange(bars.workers) * rows // bars.workers)
    return np.moveaxis(means / sharing[None, :, None], 0, 2)


class Held(NamedTuple):
    """What a worker holds from each time on: microbatches of stages, or bytes; 0
    before."""

    times: Array
    counts: Array


def held(bars: Bars, release: Direction) -> list[Held]:
    """For each worker, what it holds between F and B: from the start of F to the end
    of `release`, at the worker of B. Stages without these hold nothing."""
    key = bars.stage * bars.microbatches + bars.microbatch
    last = list(Direction).index(release)
    of = [np.flatnonzero(bars.direction == d) for d in (0, 1, last)]
    keys = np.intersect1d(np.intersect1d(key[of[0]], key[of[1]]), key[of[2]])
    f, b, gone = (_find(key, among, keys) for among in of)
    when = np.concatenate((bars.start[f], bars.end[gone]))
    change = np.repeat([1, -1], len(keys))
    place = np.tile(bars.worker[b], 2)
    order = np.lexsort((change, when, place))  # what goes, goes before what comes
    when, change, place = when[order], change[order], place[order]
    bounds = np.searchsorted(place, np.arange(bars.workers + 1))
    workers = []
    for i, j in pairwise(bounds.tolist()):
        final = np.append(np.diff(when[i:j]) > 0, True)[: j - i]  # of equal times
        times, counts = when[i:j][final], np.cumsum(change[i:j])[final]
        new = np.diff(counts, prepend=0) != 0
        workers.append(Held(times[new], counts[new]))
    return workers


def bytes_held(bars: Bars, during: Sequence[During]) -> list[Held]:
    """For each worker, what it holds from the start of each of its jobs on."""
    key = zip(bars.worker, bars.stage, bars.microbatch, bars.direction, strict=True)
    place = {tuple(map(int, each)): i for i, each in enumerate(key)}
    found = []
    for worker, (resident, jobs) in enumerate(during):
        rows = [(0.0, resident)]
        for job, size in jobs:
            where = worker, *map(int, job[:2]), LETTERS.index(str(job.direction))
            if where in place:
                rows.append((float(bars.start[place[where]]), size))
        times, sizes = np.array(sorted(rows, key=lambda row: row[0])).T
        found.append(Held(times, sizes))
    return found


def _find(key: Array, among: Array, keys: Array) -> Array:
    """Where among these bars each key is."""
    order = among[np.argsort(key[among], kind="stable")]
    return order[np.searchsorted(key[order], keys)]
