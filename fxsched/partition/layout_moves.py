"""Layouts of units in stages, and the random changes that a search makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any, NamedTuple

from .cut_cost import Cut, Problem

CAPS = (-3, -2, -1, 0, 1, 2, None)  # of Place.more
LEADS = (-2, -1, 0, 0, 1, 2)


class Place(NamedTuple):
    """Where and when a stage runs.

    workers: where there are several, they take its microbatches in turns.
    more: how many of its microbatches may be in flight, above the number of stages from
        it to the end; None for no limit.
    lead: by how many places its F come later in the order.
    """

    workers: tuple[int, ...]
    more: int | None = 0
    lead: int = 0


class Layout(NamedTuple):
    """cut: the stage of each unit. places: of each stage.

    longest: whether jobs with the longest way to the end of the step come first, or
        those of the oldest microbatch.
    """

    cut: Cut
    places: tuple[Place, ...]
    longest: bool = False


@dataclass(frozen=True)
class Moves:
    """Random changes of layouts.

    kinds: the phase of each unit, below 0 for global-batch ones. order: the units in an
        order of data flow.
    """

    problem: Problem
    kinds: Sequence[int]
    order: Sequence[int]
    workers: int

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """Units and their readers, of one phase, of which both may change stages."""
        graph, kinds = self.problem.graph, self.kinds
        return [(a, b) for a, b in graph.edges if kinds[a] == kinds[b] >= 0]

    def changed(self, layout: Layout, random: Random) -> Layout | None:
        """The layout after a random change."""
        moves: Sequence[Callable[[Layout, Random], Layout | None]] = (
            *(self._moved,) * 9,
            *(self._placed,) * 3,
            *(self._swapped,) * 2,
            *(self._parted,) * 2,
            *(self._merged,) * 2,
            *(self._ordered,) * 3,
            self._copied,
        )
        return random.choice(moves)(layout, random)

    def _crossing(self, cut: Cut) -> list[tuple[int, int]]:
        return [(a, b) for a, b in self.edges if cut[a] != cut[b]]

    def _moved(self, layout: Layout, random: Random) -> Layout | None:
        """Up to three units go to the stage of a neighbour."""
        crossing = self._crossing(layout.cut)
        if not crossing:
            return None
        a, b = random.choice(crossing)
        cut, (here, there) = list(layout.cut), (layout.cut[a], layout.cut[b])
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            if random.random() < 0.5:
                cut[a] = there
            else:
                cut[b] = here
            near = [(x, y) for x, y in crossing if (cut[x], cut[y]) == (here, there)]
            if not near:
                break
            a, b = random.choice(near)
        return _without_empty(layout._replace(cut=tuple(cut)))

    def _placed(self, layout: Layout, random: Random) -> Layout:
        """A stage goes to another worker."""
        s = random.randrange(len(layout.places))
        return _with(layout, s, workers=(random.randrange(self.workers),))

    def _swapped(self, layout: Layout, random: Random) -> Layout | None:
        """Two stages change workers."""
        if len(layout.places) < 2:
            return None
        s, t = random.sample(range(len(layout.places)), 2)
        mine, its = layout.places[s].workers, layout.places[t].workers
        return _with(_with(layout, s, workers=its), t, workers=mine)

    def _parted(self, layout: Layout, random: Random) -> Layout | None:
        """A stage is cut in two; the later part goes to any worker."""
        s = random.randrange(len(layout.places))
        inside = [u for u in self.order if layout.cut[u] == s]
        if len(inside) < 2:
            return None
        later = set(inside[random.randrange(1, len(inside)) :])
        new = len(layout.places)
        cut = tuple(new if u in later else t for u, t in enumerate(layout.cut))
        workers = (random.randrange(self.workers),)
        place = layout.places[s]._replace(workers=workers)
        return layout._replace(cut=cut, places=(*layout.places, place))

    def _merged(self, layout: Layout, random: Random) -> Layout | None:
        """A stage joins a neighbour."""
        crossing = self._crossing(layout.cut)
        if not crossing:
            return None
        a, b = random.choice(crossing)
        into, gone = layout.cut[a], layout.cut[b]
        if random.random() < 0.5:
            into, gone = gone, into
        cut = tuple(into if s == gone else s for s in layout.cut)
        return _without_empty(layout._replace(cut=cut))

    def _ordered(self, layout: Layout, random: Random) -> Layout:
        """Jobs run in another order, or a stage has another limit in flight."""
        draw, s = random.random(), random.randrange(len(layout.places))
        if draw < 0.15:
            return layout._replace(longest=not layout.longest)
        if draw < 0.3:
            more = random.choice(CAPS)
            places = (place._replace(more=more) for place in layout.places)
            return layout._replace(places=tuple(places))
        if draw < 0.65:
            return _with(layout, s, more=random.choice(CAPS))
        return _with(layout, s, lead=random.choice(LEADS))

    def _copied(self, layout: Layout, random: Random) -> Layout | None:
        """One more worker, or one fewer, takes microbatches of a stage."""
        s = random.randrange(len(layout.places))
        own = layout.places[s].workers
        others = [w for w in range(self.workers) if w not in own]
        whole = any(
            self.kinds[u] < 0 for u, stage in enumerate(layout.cut) if stage == s
        )
        if len(own) > 1 and (random.random() < 0.5 or not others):
            own = own[:-1]
        elif others and not whole:
            own = (*own, random.choice(others))
        else:
            return None
        return _with(layout, s, workers=own)


def _with(layout: Layout, stage: int, **changes: Any) -> Layout:
    """The layout with another place of a stage."""
    places = list(layout.places)
    places[stage] = places[stage]._replace(**changes)
    return layout._replace(places=tuple(places))


def _without_empty(layout: Layout) -> Layout:
    """The layout without stages that have no units."""
    left = sorted(set(layout.cut))
    if len(left) == len(layout.places):
        return layout
    new = {s: i for i, s in enumerate(left)}
    cut = tuple(new[s] for s in layout.cut)
    return layout._replace(cut=cut, places=tuple(layout.places[s] for s in left))
