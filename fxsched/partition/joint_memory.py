"""Whether workers have room for activations of all microbatches at once.

F of all microbatches comes before a global-batch stage, so those of the stages before
it are all held at one time, however many workers there are.
"""

from __future__ import annotations

from typing import NamedTuple

import networkx as nx

from ..accounts.paper import held_memory
from ..clock.joint import fit_joint, waiting_stages
from ..clock.stage_graph import run_stages
from ..jobs.schedule import Schedule
from .planner import MemoryLimitError


class Fullest(NamedTuple):
    """The worker that holds the most, and how many bytes."""

    worker: int
    bytes: float


def check_memory(
    schedule: Schedule, stages: nx.DiGraph[int], limit: float | None
) -> None:
    """Raises MemoryLimitError where a worker holds more than the limit."""
    if limit is None:
        return
    most = fullest(schedule, stages)
    if most.bytes > limit:
        raise MemoryLimitError(
            f"memory_limit={limit:.0f}: worker {most.worker} holds {most.bytes:.0f} "
            f"bytes{waiting_text(schedule, stages)}; raise the limit, use more "
            "workers, or a smaller batch",
            most.bytes,
        )


def waiting_text(schedule: Schedule, stages: nx.DiGraph[int]) -> str:
    """Why activations of all microbatches are held at one time, if they are."""
    late = waiting_stages(stages, schedule.in_order)
    if not late:
        return ""
    return (
        f", for F of all {schedule.microbatches} microbatches come before stage "
        f"{late[min(late)]}*, where their rows meet"
    )


def fullest(schedule: Schedule, stages: nx.DiGraph[int]) -> Fullest:
    """The worker that holds the most of these stages."""
    fitted = fit_joint(schedule, stages)
    memory = held_memory(fitted, stages, run_stages(fitted, stages))
    held = [each.total for each in memory]
    return Fullest(held.index(max(held)), max(held))
