"""What jobs make for other jobs, where stages alone say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import networkx as nx

from ..jobs.job import Direction
from .jobs import Jobs

FORWARD, BACKWARD, WEIGHT, _ = Direction


class Sent(NamedTuple):
    """A value that goes along an edge of stages.

    key: tells the values of one stage apart; edges of one size carry the same.
    whole: whether all microbatches read it as it is.
    """

    key: Any
    bytes: float
    whole: bool = False


class Made(NamedTuple):
    """A value that jobs of one kind make, and the kinds whose jobs read it.

    own: whether it is what a stage holds for its own later jobs. whole: as of Sent.
    """

    kind: int
    bytes: float
    readers: list[int]
    own: bool = False
    whole: bool = False


def values_along(edge: Mapping[str, Any]) -> list[Sent]:
    """What goes along an edge of stages."""
    size, whole = edge.get("bytes", 0.0), edge.get("whole", 0.0)
    if named := edge.get("values"):
        return [Sent(name, each, 0 < whole == size) for name, each in named.items()]
    values = [Sent(("whole", whole), whole, True)] if whole else []
    if size > whole or not whole:
        values.append(Sent(size - whole, size - whole))
    return values


def outputs(stages: nx.DiGraph[int], stage: int) -> list[Sent]:
    """What F of a stage gives to the stages that read it."""
    readers = sorted(stages.successors(stage))
    sent = (each for r in readers for each in values_along(stages.edges[stage, r]))
    return list({each.key: each for each in sent}.values())


def made_for_jobs(
    jobs: Jobs, stages: nx.DiGraph[int], kept: float = 1.0
) -> Iterator[Made]:
    """What jobs make for others, by kind in the order in which it is sent.

    kept: the share of activations that is still there between B and W.
    """
    at = jobs.at
    along = {(a, b): values_along(data) for a, b, data in stages.edges(data=True)}
    for kind, (s, direction) in enumerate(jobs.kinds):
        later = [at[s, d] for d in (BACKWARD, WEIGHT) if (s, d) in at]
        if direction is FORWARD:
            for value in outputs(stages, s):
                readers = [
                    at[r, d]
                    for r in stages.successors(s)
                    for sent in along[s, r]
                    for d in (FORWARD, BACKWARD)[: 1 + sent.whole]
                    if sent.key == value.key and (r, d) in at
                ]
                yield Made(kind, value.bytes, readers, whole=value.whole)
            held = stages.nodes[s].get("held", 0.0)
            if kept < 1 and later[1:]:
                yield Made(kind, held * (1 - kept), later[:1], own=True)
                held *= kept
            if later:
                yield Made(kind, held, later, own=True)
        elif direction is BACKWARD:
            for maker in sorted(stages.predecessors(s)):
                if (maker, BACKWARD) in at:
                    for value in along[maker, s]:
                        reader = at[maker, BACKWARD]
                        yield Made(kind, value.bytes, [reader], whole=value.whole)
            if later[1:]:
                yield Made(kind, 0.0, later[1:], own=True)
