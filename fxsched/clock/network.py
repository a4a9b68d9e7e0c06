"""How long messages take in a simulated step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx as nx

from ..jobs.job import PlanError
from ..jobs.user_values import is_number
from .jobs import Jobs


@dataclass(frozen=True)
class Link:
    """A link for each directed pair of workers: what is sent takes turns on it.

    bandwidth: bytes a second (or whatever unit the durations have).
    latency: time from the last byte's leaving to its arrival.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        numbers = is_number(self.bandwidth) and is_number(self.latency)
        if not numbers or not self.bandwidth > 0:
            raise PlanError(
                f"{self}: give a bandwidth above 0 and a latency of 0 or more"
            )


def check_transfer(call: str, transfer: object) -> None:
    """Raises PlanError for what is no time of messages. call: what it was given to."""
    if not (transfer is None or isinstance(transfer, Link) or is_number(transfer)):
        raise PlanError(
            f"{call}(transfer={transfer!r}): give a time of 0 or more, a Link, or None "
            "for the `seconds` of edges"
        )


def check_edges(stages: nx.DiGraph[int]) -> None:
    """Raises PlanError for edges that don't say how many bytes go along them."""
    for a, b, data in stages.edges(data=True):
        if "bytes" not in data:
            raise PlanError(
                f"simulate(transfer=Link): the edge of stages from {a} to {b} has "
                "no `bytes`; give a networkx.DiGraph whose edges have them"
            )


def edge_between(stages: nx.DiGraph[int], one: int, other: int) -> Mapping[str, float]:
    """What two stages send each other, whichever reads the other one."""
    data: Mapping[str, float] | None = stages.get_edge_data(one, other)
    return stages.get_edge_data(other, one, {}) if data is None else data


def delays(
    jobs: Jobs, stages: nx.DiGraph[int], transfer: float | Link | None
) -> dict[tuple[int, int], float]:
    """How long what one kind of job makes takes to another kind on another worker; on a
    link, if nothing else is under way."""
    found: dict[tuple[int, int], float] = {}
    for k, before in enumerate(jobs.preds):
        for p in before:
            a, b = jobs.kinds[p][0], jobs.kinds[k][0]
            edge = edge_between(stages, a, b)
            if transfer is None:
                found[p, k] = edge.get("seconds", 0.0)
            elif isinstance(transfer, Link):
                held = stages.nodes[a].get("held", 0.0)
                size = held if a == b else edge.get("bytes", 0.0)
                found[p, k] = size / transfer.bandwidth + transfer.latency
            else:
                found[p, k] = transfer
    return found
