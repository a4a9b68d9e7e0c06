"""The attributes of nodes and edges of a graph of stages.

Stages are a networkx.DiGraph, so its attributes are dicts:
`stages.nodes[2]["forward"]`. To simulate a schedule, each stage needs `forward` and
`backward`. The stages of a plan have all attributes.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from ..jobs.job import Direction


class GroupBytes(NamedTuple):
    """A group of weights that stages read.

    number: the number of the group. bytes: the bytes of the weights. trained: the bytes
        of the weights that get gradients. gradients: the bytes of a sum of these
        gradients.
    """

    number: int
    bytes: float
    trained: float
    gradients: float


class Stage(TypedDict, total=False):
    """The attributes of a node.

    forward, backward: seconds for one microbatch; a stage with `backward` 0 has no B.
    weight: if the backward is split, the part of `backward` that W takes (by default
        half of it); B takes the rest.
    again: the part of `backward` in which B computes again what F did (by default 0).
    update: seconds for a step of the optimizer on the stage's weights (by default 0).
    held: bytes of activations between F and B.
    temporary: bytes that a job takes only while it runs, beyond `held`; 0 if missing.
    weights: bytes of the stage's weights and their gradients, without weights that an
        earlier stage reads.
    gradients: bytes of the gradients in `weights` (by default half).
    state: bytes of the optimizer's state of these weights (by default 0).
    tables: bytes in `weights` of embedding tables that only embeddings read.
    moments: bytes of the optimizer's state that is averaged with the weights, where
        replicas are averaged.
    fetch: seconds to send these weights, or their gradients, one way.
    reads: the directions whose jobs read weights (by default F and B).
    groups: the groups of weights that the jobs read. The workers that keep the first
        stage with a group keep the group. By default the stage has one group of its
        own.
    joint: whether the stage is a global-batch stage, in which rows of different
        microbatches meet. Such a stage has one job in each direction (`3F*`), on all
        rows of the batch. Its forward, backward, held and flops are those of the whole
        batch; the bytes of its edges are those of one microbatch.
    whole_inputs: whether a global-batch stage reads rows of the batch itself.
    modules: the names of its modules. parameters: how many numbers its parameters have.
        flops: the FLOPs of F of one microbatch.
    """

    forward: float
    backward: float
    weight: float
    again: float
    update: float
    held: float
    temporary: float
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
    """The attributes of an edge: what one microbatch sends from stage to stage.

    Between global-batch stages, what all rows send.

    bytes: bytes sent. seconds: the time that they take one way.
    whole: how many of the bytes a global-batch stage computes once for all
        microbatches. A worker gets these bytes once (by default 0).
    values: the bytes of each value by its name, if stages are pieces of shards, several
        of which may read the same value.
    """

    bytes: float
    values: dict[str, int]
    whole: float
    seconds: float
