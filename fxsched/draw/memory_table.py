"""What the workers of a plan hold, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..clock.memory import Memory, Peaks
from .tables import byte_text, first_rows, wrapped


class WorkerMemory(NamedTuple):
    """What each worker holds at most. updates: whether the plan updates weights.
    knows_state: whether the optimizer's state is in it. parked: bytes that wait on the
    host or on disk at most, by worker."""

    peaks: Sequence[Peaks]
    updates: bool
    knows_state: bool
    parked: Mapping[str, Sequence[float]]


def memory_tables(memory: WorkerMemory) -> tuple[str, ...]:
    """What each worker holds when that is most, by kind, but for kinds that none does;
    not for plans without updates. What waits elsewhere, if anything does."""
    parked = tuple(_parked(memory))
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


def _parked(memory: WorkerMemory) -> Iterator[str]:
    for where, sizes in memory.parked.items():
        each = ", ".join(
            f"{byte_text(size)} of worker {worker}"
            for worker, size in enumerate(sizes)
            if size
        )
        on = {"host": "in pinned memory of the host"}.get(where, f"on {where}")
        yield wrapped([f"activations that wait {on}, at most: {each}"])
