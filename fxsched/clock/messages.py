"""When jobs run whose messages take turns on wires, and share what these go through."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import starmap
from typing import NamedTuple

import networkx as nx
import numpy as np

from ..jobs.schedule import Schedule
from .activations import credits
from .jobs import Jobs, Numbers
from .lines import SECONDS, Lines, as_timeline, run_lines
from .links import FindLinks, link_uses
from .network import Wires
from .timeline import Timeline
from .values import made_for_jobs


def need_no_step(schedule: Schedule, jobs: Jobs, stages: nx.DiGraph[int]) -> bool:
    """Whether jobs wait for nothing but what others make for them: no weights come from
    other workers, no sum is read, and no rows of several microbatches meet."""
    _, keeper, worker = jobs.columns
    fetched = schedule.u is not None or (keeper != worker).any()
    tied = any("groups" in data for _, data in stages.nodes(data=True))
    return not (jobs.joint or jobs.updates or fetched or tied)


def run_messages(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    timeline: Timeline,
    seconds: Sequence[float],
    wires: Wires,
) -> tuple[Timeline, FindLinks]:
    """The jobs in the order of a timeline, with the times that their messages take, and
    what finds the use of links; the same as of their step, see accounts/times.py, where
    they need none.

    seconds: of each job, by number.
    """
    jobs = timeline.jobs
    order = np.array(timeline.order, np.int64)
    line = np.empty_like(order)  # of each job; the lines of messages come after
    line[order] = np.arange(len(order))
    sent = _messages(jobs, stages, line)
    messages = len(order) + np.arange(len(sent.size))
    pairs, turns = np.unique(sent.source * jobs.workers + sent.to, return_inverse=True)
    ways = starmap(wires.wire, (divmod(int(pair), jobs.workers) for pair in pairs))
    room = np.array([*credits(schedule, timeline).items()], np.int64).reshape(-1, 2)
    made = sent.maker, messages[sent.read], line[room[:, 1]], sent.local[0]
    read = messages, sent.reader, line[room[:, 0]], sent.local[1]
    lines = Lines(
        [*map(seconds.__getitem__, timeline.order), *sent.size.tolist()],
        [SECONDS] * (1 + jobs.workers) + [*ways],
        np.concatenate((1 + jobs.columns.worker[order], 1 + jobs.workers + turns)),
        np.concatenate(made),
        np.concatenate(read),
    )
    starts, ends = run_lines(lines, wires.capacity)
    count = len(order)
    ran = as_timeline(jobs, timeline.order, starts[:count], ends[:count])
    return ran, partial(link_uses, lines, starts, ends)


class _Messages(NamedTuple):
    """maker, size, source, to: of each message, the line of the job that sends it, its
    bytes and its workers. read, reader: pairs of messages and the lines of jobs that
    read them. local: pairs of lines of one worker."""

    maker: Numbers
    size: np.ndarray[tuple[int], np.dtype[np.float64]]
    source: Numbers
    to: Numbers
    read: Numbers
    reader: Numbers
    local: tuple[Numbers, Numbers]


def _messages(jobs: Jobs, stages: nx.DiGraph[int], line: Numbers) -> _Messages:
    """What jobs send each other, in the order in which it leaves: a message for each
    value and worker that reads it, after the job that makes it."""
    values = list(made_for_jobs(jobs, stages))
    reads = [(v, made.kind, k) for v, made in enumerate(values) for k in made.readers]
    value, kind, reads_it = np.array(reads, np.int64).reshape(-1, 3).T
    value = np.broadcast_to(value, (jobs.microbatches, len(value))).ravel()
    maker, reader = jobs.grid[:, kind].ravel(), jobs.grid[:, reads_it].ravel()
    source, to = jobs.columns.worker[maker], jobs.columns.worker[reader]
    maker, reader, far = line[maker], line[reader], source != to
    place = (maker[far] * len(values) + value[far]) * jobs.workers + to[far]
    _, first, read = np.unique(place, return_index=True, return_inverse=True)
    size = np.array([made.bytes for made in values], float)
    sent = np.flatnonzero(far)[first]
    return _Messages(
        maker[sent],
        size[value[sent]],
        source[sent],
        to[sent],
        read,
        reader[far],
        (maker[~far], reader[~far]),
    )
