"""Stages in shards, where there is no model to say what these are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import networkx as nx

from ..jobs.job import Job, Piece, PlanError
from ..jobs.schedule import Schedule
from ..jobs.shards import in_pieces
from ..jobs.user_values import is_int, is_number
from .durations import Durations


def in_shards(
    schedule: Schedule,
    stages: nx.DiGraph[int],
    durations: Durations,
    sums: int = 0,
    sum_bytes: float = 0.0,
) -> tuple[Schedule, nx.DiGraph[int], Durations]:
    """A schedule, stages with their durations, and what simulate was given, by shards.

    Each shard of a stage has as much of all that the stage has, and reads what all
    shards make of the stages before. Sums cut it into equal pieces, each of which reads
    what all shards have of the sum before it.
    """
    count, every = schedule.shards, range(schedule.shards)
    at = {
        (s, k, p): Piece((s * (sums + 1) + k) * count + p, s, p, k)
        for s in sorted(stages)
        for k in range(sums + 1)
        for p in every
    }
    graph: nx.DiGraph[int] = nx.DiGraph()
    parts = count * (sums + 1)
    for piece in at.values():
        graph.add_node(piece, **_share(stages.nodes[piece.stage], parts))
    links = [((a, sums), (b, 0), data) for a, b, data in stages.edges(data=True)]
    part = {"bytes": sum_bytes}
    links += [((s, k), (s, k + 1), part) for s in stages for k in range(sums)]
    for a, b, data in links:
        graph.add_edges_from((at[*a, p], at[*b, q], data) for p in every for q in every)
    pieces = list(at.values())
    return in_pieces(schedule, pieces), graph, _shared(durations, parts)


def check_sums(schedule: Schedule, sums: int, sum_bytes: float) -> None:
    """Raises PlanError for what are no sums, and sums without shards."""
    if not is_int(sums) or sums < 0:
        raise PlanError(
            f"simulate(sums={sums!r}): give how many sums shards add up in F of each "
            "stage, 0 or more"
        )
    if not is_number(sum_bytes):
        raise PlanError(
            f"simulate(sum_bytes={sum_bytes!r}): give the bytes of what one shard has "
            "of a sum, 0 or more"
        )
    if sums and schedule.shards == 1:
        raise PlanError(
            f"simulate(sums={sums}): {schedule.name or 'the schedule'} has one shard, "
            "and no sums; give it fxsched.schedules.sharded(schedule, 2)"
        )
    if sum_bytes and not sums:
        raise PlanError(
            f"simulate(sum_bytes={sum_bytes:g}): give sums= too, how many there are"
        )


def _share(data: Mapping[str, Any], parts: int) -> dict[str, Any]:
    return {
        key: value / parts if type(value) in (int, float) else value
        for key, value in data.items()
    }


def _shared(durations: Durations, parts: int) -> Durations:
    if durations is None or isinstance(durations, Mapping):
        return None  # the stages have them
    if isinstance(durations, Sequence):
        raise PlanError(
            "simulate(durations=timeline): the schedule has shards, and only a plan "
            "knows which of their jobs make up a job of a stage; call plan.simulate"
        )

    def time(job: Job) -> float:
        assert isinstance(job.stage, Piece), "stages are pieces"
        return durations(job._replace(stage=job.stage.stage)) / parts

    return time
