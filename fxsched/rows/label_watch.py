"""Warns of losses that microbatches do not make up, at the first step that shows it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from ..ir.facts import facts
from ..ir.graphs import Role
from ..ir.request import Request
from .early_values import Early, counts, early_values
from .kinds import Kind
from .row_warnings import RowsWarning, complaints, of_labels
from .tracker import Labels, OutputRows


class Watch:
    """Looks at each call of one plan, until it has warned.

    Whether a mean over labels is one over equal parts depends on the labels: how many
    are ignored is counted in each call. On a GPU that number is read a call later, so
    that nothing waits for it.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        traced: fx.GraphModule,
        rows: OutputRows,
        loss: int | None,
        request: Request,
    ) -> None:
        reduction = request.loss_reduction
        self.microbatches = request.schedule.microbatches
        outputs = facts(traced).outputs
        if loss is None:
            scalars = [i for i, o in enumerate(outputs) if o.kind == "scalar"]
            loss = scalars[0] if len(scalars) == 1 else None
        self.texts = complaints(rows.outputs, loss, reduction, self.microbatches)
        self.labels: tuple[Labels, ...] = ()
        self.early: Early | None = None
        self.pending: list[Tensor] = []
        mean = None if loss is None else rows.outputs[loss]
        known = mean is not None and mean.kind is Kind.MEAN and mean.cause is None
        if rows.labels and known and reduction == "mean":
            nodes = [each.node for each in rows.labels]
            self.early = early_values(gm, nodes, _cut(traced))
            self.labels = rows.labels

    def __call__(self, args: Sequence[Any], said: set[str]) -> None:
        """Warns of what was not said yet; `said` holds what was."""
        for text in self.texts:
            if text not in said:
                said.add(text)
                warnings.warn(text, RowsWarning, stacklevel=2)
        self.texts.clear()
        if self.early is None or "labels" in said:
            return
        pending, self.pending = self.pending, self._count(args)
        if not self.pending[0].is_cuda:
            pending = self.pending
        for each, number in zip(self.labels, pending, strict=False):
            many = number.tolist()
            least, most = min(many), max(many)
            if least < most and "labels" not in said:
                said.add("labels")
                text = of_labels(least, most, each.ignored, each.stack)
                warnings.warn(text, RowsWarning, stacklevel=2)

    def _count(self, args: Sequence[Any]) -> list[Tensor]:
        assert self.early is not None
        return [
            counts(value, each.rows, each.ignored, self.microbatches)
            for value, each in zip(self.early(*args), self.labels, strict=True)
        ]


def _cut(traced: fx.GraphModule) -> set[int]:
    """Positions of what every call hands in: the batch, and what all rows share."""
    return {
        node.meta["index"]
        for node in traced.graph.find_nodes(op="placeholder")
        if node.meta["role"] in (Role.BATCH, Role.SHARED)
    }
