"""Groups of weights in bytes: what they take, who keeps and who updates them."""

from __future__ import annotations

from typing import NamedTuple

import networkx as nx

from ..jobs.job import Direction
from ..jobs.schedule import Schedule
from .jobs import Jobs
from .weight_fetches import groups_read
from .weight_traffic import stage_keepers, sum_size

BACKWARD = Direction.BACKWARD


class WeightGroup(NamedTuple):
    """Weights with the same keepers and the same readers.

    bytes: of the weights. gradients: of a sum of their gradients. state: of the
        optimizer's state of them, where they are updated.
    stage: the first that reads them; its U updates them.
    owners: the workers that keep them. root: the one that adds up their gradients.
    updaters: those that update them.
    givers: stages whose jobs give gradients of them.
    """

    bytes: float
    gradients: float
    state: float
    stage: int
    owners: tuple[int, ...]
    root: int
    updaters: tuple[int, ...]
    givers: tuple[int, ...]


def stage_weights(
    schedule: Schedule, stages: nx.DiGraph[int], jobs: Jobs
) -> dict[int, WeightGroup]:
    """The weights of each stage as a group of its own, by its number."""
    groups = {}
    for stage, (owners, root, updates) in stage_keepers(schedule, jobs).items():
        data = stages.nodes[stage]
        trained = (stage, Direction.BACKWARD) in jobs.at
        whole = float(data.get("weights", 0.0))
        gradients = sum_size(stages, stage)
        groups[stage] = WeightGroup(
            whole - gradients,
            gradients * trained,
            float(data.get("state", 0.0)) * trained,
            stage,
            tuple(owners),
            root,
            (root,) if updates else tuple(owners),
            (stage,) * trained,
        )
    return groups


def groups_of_kinds(
    stages: nx.DiGraph[int], jobs: Jobs
) -> tuple[list[list[int]], list[list[int]]]:
    """The groups that each kind of jobs reads, and those that it gives gradients of."""
    reads = [[s] if groups_read(stages, s, d) else [] for s, d in jobs.kinds]
    split = {s for s, d in jobs.kinds if d is Direction.WEIGHT}
    last = {s: Direction.WEIGHT if s in split else BACKWARD for s, _ in jobs.kinds}
    return reads, [[s] if d is last[s] else [] for s, d in jobs.kinds]
