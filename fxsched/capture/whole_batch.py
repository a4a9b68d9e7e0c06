"""The same graph on all rows of the batch, where rows of microbatches meet."""

from __future__ import annotations

from torch import Tensor, fx

from ..ir.graphs import Role
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
