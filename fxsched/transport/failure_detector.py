"""Which rank has gone silent, where ranks wait for others that wait for others."""

from __future__ import annotations

import time
from collections.abc import Mapping

from .board import TICK, Status

LATE = 3 * TICK  # a rank that waits writes every TICK


class FailureDetector:
    """Since when each rank has written nothing new."""

    def __init__(self) -> None:
        self.heard: dict[int, tuple[Status, float]] = {}

    def note(self, statuses: Mapping[int, Status]) -> None:
        """Takes what is on the board now."""
        now = time.monotonic()
        for rank, status in statuses.items():
            if rank not in self.heard or self.heard[rank][0] != status:
                self.heard[rank] = status, now

    def chain(self, rank: int | None) -> list[str]:
        """What the rank that one waits for waits for itself, and so on, up to a rank
        that is silent; None for all that are.

        It is the wait-for graph's path from that rank (Chandy, Misra and Haas 1983).
        A rank that waits for several says one, so where the path closes, a silent rank
        is what they wait for too; programs are proven to be without such circles.
        """
        if rank is None:
            silent = [other for other in self.heard if not self._waits(other)]
            return [self._silent(other) for other in silent] or [
                self.waiting(other) for other in self.heard
            ]
        lines: list[str] = []
        seen: set[int] = set()
        while rank in self.heard and rank not in seen and self._waits(rank):
            seen.add(rank)
            lines.append(self.waiting(rank))
            whom = self.heard[rank][0].whom
            if whom is None:
                return lines + self.chain(None)
            rank = whom
        if rank in self.heard and rank not in seen:
            return [*lines, self._silent(rank)]
        silent = [other for other in self.heard if self._is_silent(other)]
        lines += [self._silent(other) for other in silent]
        return lines if silent else [*lines, "they wait for each other"]

    def said(self) -> list[tuple[int, str, int | None, bool]]:
        """Each rank, what it wrote last, whom it waits for, and whether it is silent:
        it has not failed, and no longer says that it waits."""
        return [
            (rank, status.text, status.whom, self._is_silent(rank))
            for rank, (status, _) in self.heard.items()
        ]

    def _is_silent(self, rank: int) -> bool:
        kinds = ("failed", "departed", "apart", "closed", "ended")
        return self.heard[rank][0].kind not in kinds and not self._waits(rank)

    def _waits(self, rank: int) -> bool:
        status, since = self.heard[rank]
        return status.beat > 0 and time.monotonic() - since < LATE

    def waiting(self, rank: int) -> str:
        """What a rank wrote of its wait."""
        status, _ = self.heard[rank]
        plans = f"plans call {status.mark.call} for " * (status.kind == "plans")
        return f"rank {rank} {plans}{status.text}"

    def _silent(self, rank: int) -> str:
        return (
            f"rank {rank} waits for nobody: it is frozen, cut off from the others, or "
            "busy"
        )
