"""Whether workers have room for activations of all microbatches at once.

F of all microbatches comes before a global-batch stage, so those of the stages before
it are all held at one time, however many workers there are. With carry="recompute"
only what these stages read is: gradient caching (Gao et al. 2021, arXiv 2101.06983), by
stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import networkx as nx

from ..accounts.paper import held_memory
from ..clock.joint import fit_joint, joint_stages, waiting_stages
from ..clock.stage_graph import run_stages
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule


class Fullest(NamedTuple):
    """The worker that holds the most, and how many bytes."""

    worker: int
    bytes: float


def check_memory(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    read: Mapping[int, float],
    carry: str,
    limit: float | None,
) -> None:
    """Raises PlanError where a worker holds more than the limit; it says whether
    carry="recompute" suffices.

    read: bytes that each stage reads of others in one job.
    """
    if limit is None:
        return
    again = _recomputed(stages, read)
    most = fullest(schedule, stages if carry == "saved" else again)
    if most.bytes <= limit:
        return
    text = f"memory_limit={limit:.0f}: worker {most.worker} holds "
    text += f"{most.bytes:.0f} bytes"
    if late := waiting_stages(stages, schedule.in_order):
        joint = late[min(late)]
        text += (
            f", for F of all {schedule.microbatches} microbatches come before stage "
            f"{joint}*, where their rows meet"
        )
    least = fullest(schedule, again).bytes
    if carry == "saved" and least <= limit:
        raise PlanError(
            f'{text}; write carry="recompute", so that B runs F again (gradient '
            f"caching), with which it is {least:.0f}"
        )
    if carry == "saved" and least < most.bytes:
        text += f' ({least:.0f} with carry="recompute")'
    raise PlanError(f"{text}; raise the limit, use more workers, or a smaller batch")


def fullest(schedule: Schedule, stages: nx.DiGraph[int]) -> Fullest:
    """The worker that holds the most of these stages."""
    fitted = fit_joint(schedule, stages)
    memory = held_memory(fitted, stages, run_stages(fitted, stages))
    held = [each.total for each in memory]
    return Fullest(held.index(max(held)), max(held))


def _recomputed(stages: nx.DiGraph[int], read: Mapping[int, float]) -> nx.DiGraph[int]:
    """The stages, where those of microbatches keep what they read alone."""
    again = stages.copy()
    for s in set(stages) - joint_stages(stages):
        again.nodes[s]["held"] = min(stages.nodes[s]["held"], read[s])
    return again
