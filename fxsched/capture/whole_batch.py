"""The same graph on all rows of the batch, where rows of microbatches meet."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from ..costmodel.costs import copied
from ..ir import joint
from ..ir.graphs import Role
from ..rows.kinds import Kind, Rows
from .batch import Batch
from .microbatch import Microbatch


class WholeBatch(Microbatch):
    """The graph of the whole batch, beside that of a microbatch, whose state it has."""

    def __init__(self, part: Microbatch) -> None:
        batch = part.batch
        whole = Batch(
            1, batch.rows * batch.microbatches, batch.dims, batch.full, batch.full
        )
        super().__init__(part.gm, part.inputs, whole, part.specs, part.mode)
        self.part = part

    def put_input(self, node: fx.Node, new: fx.Node, fake: Tensor) -> None:
        """State is the same tensor in both, so that writes into it are seen."""
        if new.meta["role"] is not Role.BATCH:
            fake = self.part.values[node]
        super().put_input(node, new, fake)

    def _attribute(self, node: fx.Node) -> None:
        super()._attribute(node)
        self.values[node] = self.part.values[node]


def add(
    trace: Microbatch,
    after: fx.Node,
    target: Any,
    *args: Any,
    like: fx.Node,
    value: Any,
) -> fx.Node:
    """A node of the microbatch's graph that the model has not, at the place of one that
    it has; its value is fake."""
    if after.op == "placeholder":
        after = trace.graph.find_nodes(op="placeholder")[-1]
    with trace.graph.inserting_after(after):
        new = trace.graph.call_function(target, args)
    new.meta.update(
        val=value,
        work=copied(value),
        module=like.meta.get("module", ""),
        mutates=(),
        learns=(),
        random=0,
        stack_trace=like.meta.get("stack_trace"),
        key=f"{target.__name__}:{new.name}",
        rows=None,
        joint=True,
    )
    return new


def rows_of(trace: Microbatch, whole: fx.Node, dim: int, like: fx.Node) -> fx.Node:
    """A microbatch's rows, along a dimension, of a value of the whole batch."""
    count = trace.batch.microbatches
    with trace.mode:
        value = whole.meta["val"].chunk(count, dim)[0].clone()
    trace.tracker.put(value, Rows(Kind.SHARD, dim))
    return add(trace, whole, joint.part, whole, dim, count, like=like, value=value)
