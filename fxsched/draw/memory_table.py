"""What the workers of a plan hold, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..clock.memory import Memory, Peaks
from .tables import byte_text, first_rows, wrapped


class WorkerMemory(NamedTuple):
    """What each worker holds at most. updates: whether the plan updates weights.
    knows_state: whether the optimizer's state is in it."""

    peaks: Sequence[Peaks]
    updates: bool
    knows_state: bool


def memory_tables(memory: WorkerMemory) -> tuple[str, ...]:
    """What each worker holds when that is most, by kind, but for kinds that none does,
    if the plan has updates; and what waits on the host or on disk, if anything does."""
    away = [peak.host + peak.disk for peak in memory.peaks]
    each = ", ".join(f"worker {w} {byte_text(b)}" for w, b in enumerate(away) if b)
    text = wrapped([f"activations wait on the host or on disk, at most: {each}"])
    parked = (text,) * bool(each)
    if not memory.updates:
        return parked
    rows = [(*peak.at_once, peak.at_once.total) for peak in memory.peaks]
    names = (*Memory._fields, "together")
    used = [i for i in range(len(names)) if any(row[i] for row in rows)]
    cells = [
        (worker, *(byte_text(row[i]) for i in used)) for worker, row in enumerate(rows)
    ]
    text = first_rows("|".join(("worker", *(names[i] for i in used))), cells)
    if not memory.knows_state:
        text += "\nwithout the optimizer's state: give the plan optimizer="
    return (text, *parked)
