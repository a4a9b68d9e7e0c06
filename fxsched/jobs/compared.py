"""What the planner compared for a schedule that has candidates."""

from __future__ import annotations

from typing import NamedTuple

import networkx as nx

from .schedule import Schedule

OWN = "found"  # the name of a cut and a placement that are no candidate's


class Planned(NamedTuple):
    """A schedule for exactly these stages, with its cut.

    seconds: of its step, by estimates. bytes: of the worker that holds the most.
    """

    name: str
    schedule: Schedule
    stages: nx.DiGraph[int]
    seconds: float
    bytes: float


class Compared(NamedTuple):
    """best: what was taken. candidates: by their steps. tried: how many cuts and
    placements were simulated besides. limit: bytes that a worker may hold."""

    best: Planned
    candidates: tuple[Planned, ...]
    tried: int
    limit: float

    @property
    def within(self) -> list[Planned]:
        """The candidates of which no worker holds more than the limit."""
        return [each for each in self.candidates if each.bytes <= self.limit]

    def __str__(self) -> str:
        """For people."""
        best, within = self.best, self.within
        above = [each for each in self.candidates if each not in within]
        took = "one of these" if best.name == OWN else best.name
        also = f"{self.tried} cuts and placements were compared with schedules of the "
        if not self.tried:  # as none could be shorter by what makes it worth a search
            also = "compared were schedules of the "
        text = (
            f"{also}library: {_steps(within) or 'none'}; taken: {took}, "
            f"{best.seconds * 1e3:.4g} ms"
        )
        if above:
            size = f"{self.limit / 2**20:.4g} MiB"
            text += f"\nleft out, as a worker holds more than {size}: {_steps(above)}"
        return text


def _steps(some: list[Planned]) -> str:
    return ", ".join(f"{each.name} {each.seconds * 1e3:.4g} ms" for each in some)
