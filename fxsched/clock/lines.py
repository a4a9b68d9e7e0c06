"""When jobs and messages run that have their order: lines of workers and of wires.

Each line starts when all that it waits for has ended, and what it takes its turn on, a
worker or a wire, is done with the line before it. So a line's times follow at once from
those of others, with no calendar, but for messages that share resources: their rates
depend on what else is under way.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .flows import Flows, Wire
from .jobs import Jobs, Numbers
from .timeline import Timeline

SECONDS = Wire(1.0)  # the way of what takes so many seconds


class Lines(NamedTuple):
    """Jobs, messages, and what is done beside them, by number.

    amounts: the seconds of each line or, of a message on a wire, its bytes.
    ways: what lines take their turns on, by the order of their numbers. turns: the
        place among `ways` of each line; 0 for one that waits for no turn.
    makers, readers: pairs of lines, of which the second waits for the first.
    """

    amounts: Sequence[float]
    ways: Sequence[Wire]
    turns: Sequence[int] | Numbers
    makers: Sequence[int] | Numbers
    readers: Sequence[int] | Numbers


class _Waits(NamedTuple):
    """What waits for what.

    following: of each line, the next on its way, or -1. missing: how many each waits
        for. heads, readers: readers[heads[i] : heads[i + 1]] wait for line i.
    """

    following: list[int]
    missing: list[int]
    heads: list[int]
    readers: list[int]


def _waits(lines: Lines) -> _Waits:
    count = len(lines.amounts)
    turns, makers, readers = (np.asarray(each, np.int64) for each in lines[2:])
    by_turn = np.argsort(turns, kind="stable")[np.count_nonzero(turns == 0) :]
    one, other = by_turn[:-1], by_turn[1:]
    same = turns[one] == turns[other]
    following = np.full(count, -1)
    following[one[same]] = other[same]
    missing = np.bincount(readers, minlength=count)
    missing[other[same]] += 1
    heads = np.concatenate(([0], np.cumsum(np.bincount(makers, minlength=count))))
    by_maker = readers[np.argsort(makers, kind="stable")]
    return _Waits(*(a.tolist() for a in (following, missing, heads, by_maker)))


def run_lines(
    lines: Lines, capacity: Mapping[Hashable, float]
) -> tuple[list[float], list[float]]:
    """When each line starts and ends; a message on a wire ends where it arrives.

    capacity: of resources that messages share; see Flows.
    """
    amounts, ways = lines.amounts, lines.ways
    way = [ways[turn] for turn in np.asarray(lines.turns).tolist()]
    following, missing, heads, readers = _waits(lines)
    starts, ends = [0.0] * len(way), [0.0] * len(way)
    ready = [i for i, count in enumerate(missing) if not count]
    flows = Flows(capacity)
    while True:
        if ready:
            i = ready.pop()
            bandwidth, resources, begin, latency, _ = way[i]
            if resources:
                flows.add(i, starts[i] + begin, resources, amounts[i])
                continue
            left = starts[i] + begin + amounts[i] / bandwidth
        elif (message := flows.next()) is not None:
            left, i = message
            latency = way[i].latency
        else:
            return starts, ends
        ends[i] = when = left + latency
        for j in readers[heads[i] : heads[i + 1]]:
            if starts[j] < when:
                starts[j] = when
            missing[j] -= 1
            if not missing[j]:
                ready.append(j)
        if (j := following[i]) >= 0:
            if starts[j] < left:
                starts[j] = left
            missing[j] -= 1
            if not missing[j]:
                ready.append(j)


def as_timeline(
    jobs: Jobs, numbers: Sequence[int], starts: Sequence[float], ends: Sequence[float]
) -> Timeline:
    """The timeline of jobs with these numbers, starts and ends."""
    order, start = np.array(numbers, np.int64), np.array(starts)
    by_start = np.lexsort((jobs.columns.worker[order], start))
    columns = order, start, np.array(ends)
    return Timeline(jobs, *(column[by_start].tolist() for column in columns))
