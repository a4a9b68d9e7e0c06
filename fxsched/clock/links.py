"""What links move in a step, and when they are busy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum
from typing import NamedTuple

import numpy as np

from .flows import LinkName
from .lines import Lines

ROUNDING = 1e-9  # of the step; between messages that follow each other


class LinkUse(NamedTuple):
    """What one link moves in a step.

    name: such as "host 0 out". bytes: of the messages on the link. busy: the starts and
        ends of the times in which a message is on the link, whatever its rate: from
        when its first byte leaves until its last byte has left.
    """

    name: str
    bytes: float
    busy: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        """How long the link is busy, in the unit of the durations."""
        return sum(end - start for start, end in self.busy)


FindLinks = Callable[[], tuple[LinkUse, ...]]


def link_uses(
    lines: Lines, starts: Sequence[float], ends: Sequence[float]
) -> tuple[LinkUse, ...]:
    """The use of each link that moves bytes. starts, ends: of lines, see run_lines."""
    turns, begin, left = np.asarray(lines.turns), np.array(starts), np.array(ends)
    begin += np.array([way.begin for way in lines.ways])[turns]
    left -= np.array([way.latency for way in lines.ways])[turns]
    by_way = np.argsort(turns, kind="stable")
    heads = np.searchsorted(turns[by_way], np.arange(len(lines.ways) + 1))
    ways: dict[LinkName, list[int]] = {}
    for i, way in enumerate(lines.ways):
        for link in way.links:
            ways.setdefault(link, []).append(i)
    amounts, step, found = np.array(lines.amounts), max(ends, default=0.0), []
    for link, its in sorted(ways.items()):
        mine = np.concatenate([by_way[heads[i] : heads[i + 1]] for i in its])
        mine = mine[amounts[mine] > 0]
        if len(mine):
            busy = _union(begin[mine], left[mine], ROUNDING * step)
            size = fsum(amounts[mine])  # the same in any order
            found.append(LinkUse(link.text, size, busy))
    return tuple(found)


def _union(
    start: np.ndarray[tuple[int], np.dtype[np.float64]],
    end: np.ndarray[tuple[int], np.dtype[np.float64]],
    gap: float,
) -> tuple[tuple[float, float], ...]:
    """The union of intervals; a gap that isn't longer than `gap` is none."""
    by_start, end = np.argsort(start), np.maximum(start, end)
    start, reach = start[by_start], np.maximum.accumulate(end[by_start])
    new = np.flatnonzero(start[1:] > reach[:-1] + gap) + 1
    first, last = np.append(0, new), np.append(new, len(start)) - 1
    return tuple(zip(start[first].tolist(), reach[last].tolist(), strict=True))
