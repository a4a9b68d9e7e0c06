"""Stages in shards, where there is no model to say what these are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import networkx as nx

from ..jobs.job import Job, Piece, PlanError
from ..jobs.schedule import Schedule
from ..jobs.shards import in_pieces
from .durations import Durations


def in_shards(
    schedule: Schedule, stages: nx.DiGraph[int], durations: Durations
) -> tuple[Schedule, nx.DiGraph[int], Durations]:
    """A schedule, stages with their durations, and what simulate was given, by shards.

    Each shard of a stage has as much of all that the stage has, and reads what all
    shards make of the stages before. Sums inside of a stage take no time.
    """
    count = schedule.shards
    every = {
        (s, p): Piece(s * count + p, s, p, 0) for s in stages for p in range(count)
    }
    pieces = [every[s, p] for s in sorted(stages) for p in range(count)]
    graph: nx.DiGraph[int] = nx.DiGraph()
    for piece in pieces:
        graph.add_node(piece, **_share(stages.nodes[piece.stage], count))
    for a, b, data in stages.edges(data=True):
        for p in range(count):
            graph.add_edges_from((every[a, p], every[b, q], data) for q in range(count))
    return in_pieces(schedule, pieces), graph, _shared(durations, count)


def _share(data: Mapping[str, Any], count: int) -> dict[str, Any]:
    return {
        key: value / count if type(value) in (int, float) else value
        for key, value in data.items()
    }


def _shared(durations: Durations, count: int) -> Durations:
    if durations is None or isinstance(durations, Mapping):
        return None  # the stages have them
    if isinstance(durations, Sequence):
        raise PlanError(
            f"simulate(durations=timeline): the schedule has {count} shards, and which "
            "of their jobs make up a stage's only a plan knows; call plan.simulate"
        )

    def time(job: Job) -> float:
        assert isinstance(job.stage, Piece), "stages are pieces"
        return durations(job._replace(stage=job.stage.stage)) / count

    return time
