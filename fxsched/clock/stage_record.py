"""What the nodes and edges of a graph of stages say.

Stages are a networkx.DiGraph, so these are dicts: `stages.nodes[2]["forward"]`. To run
a schedule, a stage needs `forward` and `backward`; a plan's stages say it all.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from ..jobs.job import Direction


class GroupBytes(NamedTuple):
    """A group of weights that stages read, by a number of its own.

    bytes: of the weights. trained: of those that get gradients. gradients: of a sum of
    these.
    """

    number: int
    bytes: float
    trained: float
    gradients: float


class Stage(TypedDict, total=False):
    """A node.

    forward, backward: seconds for one microbatch; a stage with `backward` 0 has no B.
    weight: where the backward is split, how much of `backward` W takes (half, if it
        isn't there), and B the rest.
    update: seconds for a step of the optimizer on its weights (0, if it isn't there).
    held: bytes between F and B.
    weights: bytes of the weights, and their gradients, that no stage before it reads.
    gradients: of these, bytes of the gradients (half, if it isn't there).
    state: bytes of the optimizer's state of them (0, if it isn't there).
    tables: those of embedding tables that nothing else reads.
    moments: bytes of what the optimizer keeps and averages with the weights, where
        replicas are averaged.
    fetch: seconds to send these weights, or their gradients, one way.
    reads: the directions whose jobs read weights (F and B, if it isn't there).
    groups: the groups of weights that they read, which those that keep the first stage
        with a group keep (one of the stage's own, if it isn't there).
    joint: whether rows of different microbatches meet in it: it has one job a direction
        (`3F*`), on all rows of the batch. Then forward, backward, held and flops are
        of the whole batch, not of a microbatch; what its edges say is of one.
    whole_inputs: whether a global-batch stage reads rows of the batch itself.
    modules: names. parameters: numbers in them. flops: of one microbatch's F.
    """

    forward: float
    backward: float
    weight: float
    update: float
    held: float
    weights: float
    gradients: float
    state: float
    tables: float
    moments: float
    fetch: float
    reads: tuple[Direction, ...]
    groups: tuple[GroupBytes, ...]
    joint: bool
    whole_inputs: bool
    modules: list[str]
    parameters: int
    flops: float


class Edge(TypedDict, total=False):
    """What one microbatch sends along it, between global-batch stages all rows: bytes,
    and the seconds that takes one way.

    whole: how many of the bytes a global-batch stage makes for all microbatches, which
        read them as they are; a worker gets them once (0, if it isn't there).
    values: the bytes of each value by its name, where stages are pieces of shards, of
        which several may read the same.
    """

    bytes: float
    values: dict[str, int]
    whole: float
    seconds: float
