"""Warns of losses that microbatches do not make up, at the first step that shows it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..ir.early import Early, early_values
from ..ir.facts import facts
from ..ir.graphs import Role
from ..ir.meta import of_node
from ..ir.request import Request
from ..ir.user_line import line_of, user_line
from .kinds import Cause, Effect, Kind, Rows
from .tracker import Tracker
from .weighted_loss import label_mean


class RowsWarning(UserWarning):
    """Warns that microbatches' losses or outputs don't combine to the whole batch's."""


class Labels(NamedTuple):
    """A mean over the labels that are not `ignored`: how many each microbatch has says
    whether it is a mean over equal parts."""

    rows: Rows
    ignored: int
    stack: str | None

    def counts(self, labels: Tensor, microbatches: int) -> Tensor:
        """How many labels of each microbatch are not ignored: [microbatches]."""
        before = self.rows.outer * math.prod(labels.shape[: self.rows.dim])
        counted = labels.reshape(before, microbatches, -1) != self.ignored
        return counted.sum((0, 2))


def labels_of(
    gm: fx.GraphModule, rows: Callable[[fx.Node], Rows | None]
) -> dict[fx.Node, Labels]:
    """What the means over labels of a graph are of, where classes have no weights."""
    calls = ((node, label_mean(node)) for node in gm.graph.nodes)
    return {
        call["target"]: Labels(of, call["ignore_index"], node.meta.get("stack_trace"))
        for node, call in calls
        if call and call["weight"] is None and (of := rows(call["target"]))
    }


OTHERWISE = (
    "each microbatch does this by itself; fxsched.verify shows how much the results "
    "differ"
)
REMEDIES = {
    Effect.STATISTICS: (
        "each microbatch has statistics of its own; leave out batch_norm= and "
        "loss_reduction=, and BatchNorm has those of the whole batch, or use a layer "
        "that normalises each row (GroupNorm, LayerNorm)"
    ),
    Effect.PAIRS: "each row meets only the rows of its own microbatch",
    Effect.RATIO: (
        'write fxsched.backend(schedule, loss_reduction="weighted"), which weighs the '
        "rows over the whole batch"
    ),
    Effect.CONSTANT: (
        "it is added once for each microbatch; add it after the call, or make the loss "
        "a mean"
    ),
    Effect.ORDER: OTHERWISE,
    Effect.BOTH: "divide the sum by the batch size, or multiply the mean by it",
}
PLACES = 4  # where rows meet, that a plan names
REDUCTIONS = {
    (Kind.SUM, "mean"): (
        'the loss is a sum over the batch, but loss_reduction="mean" takes the mean of '
        "its {0} microbatches: it and its gradients are 1/{0} of eager's\n"
        '  write fxsched.backend(schedule, loss_reduction="sum")'
    ),
    (Kind.MEAN, "sum"): (
        'the loss is a mean over the batch, but loss_reduction="sum" adds up its {0} '
        "microbatches: it and its gradients are {0} times eager's\n"
        "  leave loss_reduction out, or return a sum"
    ),
}


def meeting_text(tracker: Tracker, meets: bool) -> str:
    """Where rows of the batch meet, or may, a line for each of the first places;
    nothing if they don't."""
    lines = dict.fromkeys(map(_of_meeting, tracker.causes if meets else ()))
    more = len(lines) - PLACES
    last = [f"and in {more} more place{'s' * (more > 1)}"] * (more > 0)
    return "\n".join([*lines][:PLACES] + last)


def _of_meeting(cause: Cause) -> str:
    line = user_line(cause.stack)
    at = f", at {line.path}:{line.number}" if line else ""
    if cause.effect is Effect.UNSURE:
        yours = "describe the operator with fxsched.placements, or "
        yours *= not hasattr(torch.ops.aten, cause.operation)
        return (
            f"rows of the batch may meet in {cause.operation}{at}, for which fxsched "
            f"has no rule; if they don't, {yours}write "
            'loss_reduction="mean", with which each microbatch runs by itself, and the '
            "loss is the mean of all microbatches' losses"
        )
    return f"rows of the batch meet in {cause.operation}{at}: {cause.effect.value}"


def _of_labels(least: int, most: int, ignored: int, stack: str | None) -> str:
    return (
        f"the loss is a mean over the labels that are not {ignored}, of which "
        f"microbatches have from {least} to {most}, so the mean of the microbatches is "
        f"not eager's loss{line_of(stack)}\n  {REMEDIES[Effect.RATIO]}"
    )


def _of_cause(what: str, cause: Cause, microbatches: int) -> str:
    doubtful = cause.effect in (Effect.ORDER, Effect.UNSURE)
    sure = "may not be" if doubtful else "is not"
    return (
        f"{what} of {microbatches} microbatches {sure} eager's on the whole batch: "
        f"{cause.effect.value} ({cause.operation}){line_of(cause.stack)}\n"
        f"  {REMEDIES.get(cause.effect, OTHERWISE)}"
    )


class RowWatch:
    """Looks at each call of one plan, until it has warned.

    exact: whether the user asked for the whole batch's values.

    Whether a mean over labels is one over equal parts depends on the labels: how many
    are ignored is counted in each call. On a GPU that number is read a call later, so
    that nothing waits for it.
    """

    def __init__(
        self,
        traced: fx.GraphModule,
        rows: Sequence[Rows | None],
        labels: Mapping[fx.Node, Labels],
        loss: int | None,
        request: Request,
        exact: bool = False,
    ) -> None:
        self.microbatches = request.schedule.microbatches
        self.reduction, self.exact = request.loss_reduction, exact
        if loss is None:
            outputs = enumerate(facts(traced).outputs)
            scalars = [i for i, output in outputs if output.kind == "scalar"]
            loss = scalars[0] if len(scalars) == 1 else None
        self.texts = [*self._complaints(rows, loss)]
        self.labels = [*labels.values()]
        self.early: Early | None = None
        self.pending: list[Tensor] = []
        mean = loss is not None and rows[loss] == Rows(Kind.MEAN)
        if labels and mean and self.reduction == "mean":
            self.early = early_values([*labels], _cut(traced))

    def _complaints(
        self, rows: Sequence[Rows | None], loss: int | None
    ) -> Iterator[str]:
        """What the user should know of the outputs of a model: the loss first, each
        cause once."""
        seen: set[Cause] = set()
        for position in sorted(range(len(rows)), key=lambda i: i != loss):
            each, is_loss = rows[position], position == loss
            if each is None or each.cause in seen:
                continue
            if each.cause is not None:
                seen.add(each.cause)
                # what may mix rows is no news where the user says how losses add up
                told = self.exact or each.cause.effect is not Effect.UNSURE
                if told and (
                    each.sharded or (is_loss and each.kind is not Kind.UNKNOWN)
                ):
                    what = "the loss" if is_loss else f"output {position}"
                    yield _of_cause(what, each.cause, self.microbatches)
            elif each.sharded and each.numbers and not is_loss:
                yield (
                    f"output {position} has the numbers of the rows in each of "
                    f"{self.microbatches} microbatches, not in the whole batch; make "
                    "it after the call"
                )
            if is_loss and (each.kind, self.reduction) in REDUCTIONS:
                text = REDUCTIONS[each.kind, self.reduction]
                yield text.format(self.microbatches)

    def __call__(self, args: Sequence[Any], said: set[str]) -> None:
        """Warns of what was not said yet; `said` holds what was."""
        for text in self.texts:
            _warn(text, text, said)
        self.texts.clear()
        if self.early is None or "labels" in said:
            return
        pairs = zip(self.early(*args), self.labels, strict=True)
        counts = [labels.counts(value, self.microbatches) for value, labels in pairs]
        last, self.pending = self.pending, counts
        counts = counts if counts[0].device.type == "cpu" else last
        for each, count in zip(self.labels, counts, strict=False):
            many = count.tolist()
            least, most = min(many), max(many)
            if least < most:
                text = _of_labels(least, most, each.ignored, each.stack)
                _warn("labels", text, said)


def _warn(key: str, text: str, said: set[str]) -> None:
    """Once."""
    if key not in said:
        said.add(key)
        warnings.warn(text, RowsWarning, stacklevel=3)


def _cut(traced: fx.GraphModule) -> set[int]:
    """Positions of what every call hands in: the batch, and what all rows share."""
    return {
        of_node(node)["index"]
        for node in traced.graph.find_nodes(op="placeholder")
        if of_node(node)["role"] in (Role.BATCH, Role.SHARED)
    }
