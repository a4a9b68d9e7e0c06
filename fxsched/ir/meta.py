"""What passes know of a node: records in node.meta, read and written here alone.

A graph is first that of the model, whose nodes are operations, and then one of calls of
stages. torch.fx copies node.meta with its nodes; PyTorch's own keys are left as they
are (val, stack_trace, custom).
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack, cast

from torch import fx

from ..jobs.job import Direction
from .graphs import Role, Specs

Moments = tuple[tuple[tuple[int, ...], int], ...]


class AnyRecord(TypedDict, total=False):
    """Of a node of either graph.

    val: its fake value, or values. name: the user's name of an input.
    index, input: position of an input of any kind, and of a batch input, in the call.
    dim: dimension along which a batch input is cut.
    key: name that a node keeps in other traces of the model.
    stage: stage of a node. joint: whether it is of all rows of the batch.
    tangent: the output whose gradient a placeholder is.
    """

    val: Any
    name: str
    index: int
    input: int
    dim: int
    key: str
    stage: Any
    joint: bool
    tangent: Any


class NodeRecord(AnyRecord, total=False):
    """Of an operation or an input of the model.

    role: what an input is. origin: where the call has it (capture.Origin); arguments:
        what the caller calls it.
    module: the module that a node was called in. stack_trace: the user's line.
    work: what it costs (costmodel.Work); estimated: its estimated Times, where a
        profile gave it its work.
    source: the node of the model's graph that it was made of.
    mutates: fake tensors that it writes into; learns: of these, running statistics of a
        normalization.
    recompute: which call of torch.utils.checkpoint it is in, if any; again: whether it
        computes in B what F did.
    rows: how its value depends on the batch (rows.Rows).
    passed: stages that give a value that they read to the next that does.
    random: how many draws of random numbers it makes; replicated: whether they are made
        once for all microbatches; draws: those in the model, the same on all shards.
    shard: shard of a stage that it is of; level: how often shards read each other
        before it.
    owners, updater: who keeps a part of a weight since an earlier plan, and who updates
        it, if u said.
    custom: number of the node of a stage that a flat graph's node is of, as `line`.
    """

    role: Role
    origin: Any
    arguments: Any
    module: str
    stack_trace: str | None
    work: Any
    estimated: Any
    source: fx.Node
    mutates: Any
    learns: Any
    recompute: Any
    again: bool
    rows: Any
    passed: Any
    random: int
    replicated: bool
    draws: Any
    shard: int
    level: int
    owners: tuple[int, ...]
    updater: int | None
    custom: dict[str, Any]


class CallRecord(AnyRecord, total=False):
    """Of a stage's call, or of what lies between calls.

    direction: of the call. draw: number of the stage's first draw in the model, if any.
    seconds: of the call, estimated or measured.
    group: number of a group of weights, or of the sum of its gradients.
    specs: shapes of the tensors in a value. bundle: whether it is a tuple of them.
    held: bytes of memory that it takes which no other value of its job has; received:
        those that it takes where a message brings it.
    moments: what a job takes while it runs, and where its gradients are added to sums;
        see autodiff/temporaries.py. temporary: on paper, the most of it.
    lent: positions of tensors in it that are views of rows of the batch.
    trained: whether what a stage gives has a gradient.
    worker: that runs it. task: the job or other piece of work that it belongs to; n:
        priority of that. job: the job that a call is.
    aside: the lane beside the worker's jobs that it runs in, if it runs in one.
    posts: tags of receives that its task posts.
    own: whether a user's pass made it. replaces: name of the node that it is in the
        place of, by what a pass says.
    """

    direction: Direction
    draw: int | None
    seconds: Any
    group: int
    specs: Specs
    bundle: bool
    held: float
    received: float
    moments: tuple[Moments, ...]
    temporary: float
    lent: tuple[int, ...]
    trained: bool
    worker: int
    task: str
    n: int
    job: Any
    aside: int
    posts: tuple[int, ...]
    own: bool
    replaces: str


KEYS = NodeRecord.__annotations__.keys() | CallRecord.__annotations__.keys()

# Those that no one reads once stages are differentiated; compilers of stages read "val"
# of placeholders.
SPENT = ("val", "origin", "arguments", "work", "estimated", "mutates", "learns", "rows")

# Of gm.meta.
GRAPH_META = {
    "facts": "Facts of the model",
    "lines": "the user's lines of a stage's nodes",
    "replaced": "whether a pass of the user may have changed a stage",
}


def of_node(node: fx.Node) -> NodeRecord:
    """What is known of a node of the model's graph."""
    return cast(NodeRecord, node.meta)


def of_call(node: fx.Node) -> CallRecord:
    """What is known of a node of a graph of calls."""
    return cast(CallRecord, node.meta)


def note(node: fx.Node, **known: Unpack[NodeRecord]) -> None:
    """Adds to what is known of a node of the model's graph."""
    node.meta.update(known)


def note_call(node: fx.Node, **known: Unpack[CallRecord]) -> None:
    """Adds to what is known of a node of a graph of calls."""
    node.meta.update(known)
