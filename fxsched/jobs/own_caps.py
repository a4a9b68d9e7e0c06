"""Caps that a schedule's own shape comes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class OwnCaps:
    """A schedule's in_flight that gives it its shape, as 1f1b's, and is no limit of the
    user's: lifted where B waits for F of all microbatches, which a limit may not be.

    lifted: the stages for which that is so.
    """

    cap: Callable[[int], int | None]
    lifted: frozenset[int] = frozenset()

    def __call__(self, stage: int) -> int | None:
        return None if stage in self.lifted else self.cap(stage)


class CapsOfKnown:
    """A schedule's in_flight for a plan that has more stages than the schedule.

    known: of the plan's stages, which of the schedule's stages each one is of.
    """

    known: Mapping[int, int]
