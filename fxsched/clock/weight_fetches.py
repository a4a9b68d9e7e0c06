"""Who serves the weights that jobs read, and how long fetched ones stay.

A group of weights comes from the worker that w names, if that keeps it. A tied
parameter is kept by the owners of its first stage only, and what an earlier plan placed
stays there; then a job's own worker comes first, and the group's first owner last. What
comes from elsewhere stays while the worker's next job reads it from there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from ..jobs.job import Direction
from ..jobs.schedule import Schedule
from .jobs import Jobs, Numbers
from .timeline import Timeline

Flags: TypeAlias = NDArray[np.bool_]
Groups = Sequence[tuple[int, Sequence[int] | None]]  # and the owners; None: w's


@dataclass(frozen=True)
class Read:
    """A group of weights that each of some jobs reads.

    group: -1 for none. source: the worker that serves it. foreign: whether the job
    needs it from another worker than its own.
    """

    group: Numbers
    source: Numbers
    foreign: Flags


def source_of(owners: Sequence[int], keeper: int, here: int) -> int:
    """The worker that serves a group of weights to one job.

    keeper: where w puts the job's weights. here: where it runs.
    """
    return next((w for w in (keeper, here) if w in owners), owners[0])


def _by_worker(jobs: Jobs, order: Sequence[int]) -> tuple[Numbers, Numbers]:
    """Jobs in the order of their workers, then as they come: places in `order`, and
    numbers."""
    numbers = np.asarray(order, np.int64)
    numbers = numbers[numbers < jobs.regular]
    places = np.argsort(jobs.columns.worker[numbers], kind="stable")
    return places, numbers[places]


def _reads(groups: Sequence[Groups], jobs: Jobs, numbers: Numbers) -> list[Read]:
    """The first group that each job reads, the second and so on.

    groups: those that each kind of jobs reads, in order.
    """
    kind = jobs.columns.kind[numbers]
    here = jobs.columns.worker[numbers]
    keeper = jobs.columns.keeper[numbers]
    keeps, first = _owners(groups, jobs.workers)
    columns = []
    for i in range(max(map(len, groups), default=0)):
        group = np.array([g[i][0] if i < len(g) else -1 for g in groups], int)[kind]
        other = np.where(keeps[group, here], here, first[group])
        source = np.where(keeps[group, keeper], keeper, other)
        columns.append(Read(group, source, (group >= 0) & (source != here)))
    return columns


def _owners(groups: Sequence[Groups], workers: int) -> tuple[Flags, Numbers]:
    """Whether each worker keeps each group, and the first that does."""
    owners = dict(each for reading in groups for each in reading)
    count = max(owners, default=-1) + 1
    # an earlier plan may have had more workers
    workers = max(workers, *(k + 1 for ks in owners.values() for k in ks or ()), 0)
    keeps, first = np.ones((count + 1, workers), bool), np.zeros(count + 1, np.int64)
    for group, keepers in owners.items():
        if keepers is not None:
            keeps[group] = False
            keeps[group, list(keepers)] = True
            first[group] = keepers[0]
    return keeps, first


def _fetched(read: Read, columns: Sequence[Read], here: Numbers) -> Flags:
    """Whether a job fetches what it reads: the worker's last job has not read it.

    here: the jobs' workers, which they are sorted by.
    """
    new = read.foreign.copy()
    for last in columns:
        new[1:] &= ~(
            last.foreign[:-1]
            & (here[1:] == here[:-1])
            & (last.source[:-1] == read.source[1:])
            & (last.group[:-1] == read.group[1:])
        )
    return new


def fetches(
    schedule: Schedule, stages: nx.DiGraph[int], timeline: Timeline
) -> tuple[Numbers, Flags, Numbers, Numbers]:
    """The jobs of worker 0 in their order, then those of worker 1 and so on; whether
    each reads weights kept elsewhere; how many groups of them it has to fetch; and from
    where."""
    jobs = timeline.jobs
    _, numbers = _by_worker(jobs, timeline.order)
    here = jobs.columns.worker[numbers]
    columns = _reads([groups_read(stages, s, d) for s, d in jobs.kinds], jobs, numbers)
    updated = _updated(jobs, numbers)
    away, count = np.zeros(len(numbers), bool), np.zeros(len(numbers), np.int64)
    origin = jobs.columns.keeper[numbers]
    for read in columns:
        new = _fetched(read, columns, here)
        if updated is not None:
            new |= read.foreign & updated
        away |= read.foreign
        origin[new] = read.source[new]
        count += new
    return numbers, away, count, origin


def _updated(jobs: Jobs, numbers: Numbers) -> Flags | None:
    """Whether jobs read other versions of weights than the jobs before them; None, if a
    call has one."""
    versions = np.asarray(jobs.versions, np.int64)
    if not (versions.any() or jobs.gaps):
        return None
    seen = versions[numbers] if len(versions) else np.zeros_like(numbers)
    other = np.asarray(np.diff(seen, prepend=seen[:1]) != 0)
    if jobs.gaps:
        gaps = np.asarray(jobs.gaps)[jobs.columns.kind[numbers]]
        other |= np.diff(gaps, prepend=gaps[:1]) != 0
    return other


def groups_read(stages: nx.DiGraph[int], stage: int, direction: Direction) -> Groups:
    """The groups that a stage's jobs read; its own weights, where nothing says so."""
    data = stages.nodes[stage]
    if direction not in data.get("reads", (Direction.FORWARD, Direction.BACKWARD)):
        return ()
    groups: Groups = data.get("groups", ((stage, None),))
    return groups
