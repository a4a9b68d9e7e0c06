"""loss_reduction="weighted": what inputs decide is the whole batch's in every part.

A weighted mean over the batch is a sum divided by a count. If the count depends on the
inputs alone (labels that are ignored, a mask), it is computed for the whole batch
before the step, and the loss is a sum over the batch:

before: total = cross_entropy(x, y, reduction="sum")
        count = (y != -100).sum()
        loss = total / count          # of the microbatch
after:  total = cross_entropy(x, y, reduction="sum")
        loss = total / batch_total_0  # an input of the step
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.graphs import ancestors, name_of, named_arguments
from ..ir.request import LossReduction
from ..ir.rewrites import added, rewritten
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from .kinds import Kind, Rows

aten = torch.ops.aten
MEANS = ("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d")  # over labels
MEAN, SUM = 1, 2  # as operations have their reduction
ADDITIONS = ("add", "sub")


def label_mean(node: fx.Node) -> dict[str, Any] | None:
    """What a mean over labels, which are classes, is called with; None of others."""
    if name_of(node.target) not in MEANS:
        return None
    call = named_arguments(node)
    classes = not call["target"].meta["example_value"].is_floating_point()
    return call if call["reduction"] == MEAN and classes else None


def labels_decide(gm: fx.GraphModule) -> bool:
    """Whether a graph has means over labels that the call hands in."""
    means = filter(None, map(label_mean, gm.graph.nodes))
    return any(_handed_in(call["target"]) for call in means)


def _handed_in(node: fx.Node) -> bool:
    """Whether a value comes of inputs that are tensors."""
    inputs = (n for n in ancestors([node]) if n.op == "placeholder")
    return any(isinstance(n.meta.get("example_value"), Tensor) for n in inputs)


def part_means(gm: fx.GraphModule, whole: bool = False) -> fx.GraphModule:
    """A copy in which means over labels are a sum, divided by a count.

    whole: whether those that the count isn't known of may be left to the whole batch.

    before: loss = cross_entropy(x, y)
    after:  total = cross_entropy(x, y, reduction="sum"); kept = y != -100
            count = kept.sum(); loss = total / count
    """
    return rewritten(gm, partial(_parted, whole=whole))


def _parted(node: fx.Node, whole: bool) -> fx.Node:
    call = label_mean(node)
    if call is None:
        return node
    labels, weight = call["target"], call["weight"]
    if whole and (weight is not None or not _handed_in(labels)):
        return node
    if weight is not None:
        raise PlanError(
            'loss_reduction="weighted": the sum of the class weights of the labels is '
            f"not known before the step{line_of(node.meta.get('stack_trace'))}\n  "
            'write reduction="sum", and divide by weight[labels].sum() in the model, '
            "or return both numbers from the model and divide after the call"
        )
    node.args, node.kwargs = tuple((call | {"reduction": SUM}).values()), {}
    example = node.meta["example_value"]
    ignored, all_labels = call["ignore_index"], labels.meta["example_value"]
    mask = added(node, aten.ne.Scalar, labels, ignored, value=all_labels)
    count = added(node, aten.sum.default, mask, value=example)
    return added(node, aten.div.Tensor, node, count, value=example)


def parts_of_sum(node: fx.Node, rows: Sequence[Rows | None]) -> list[int]:
    """Which of the two operands of an addition are means, or shared, beside a sum; they
    count once for each microbatch."""
    if name_of(node.target) not in ADDITIONS or len(rows) != 2:
        return []
    kinds = [None if each is None else each.kind for each in rows]
    if Kind.SUM not in kinds:
        return []
    return [i for i in (0, 1) if kinds[i] in (Kind.MEAN, Kind.REPLICATE, None)]


def reduction_of(losses: Sequence[Rows]) -> LossReduction:
    """How the microbatches' losses become the whole batch's: "sum" or "mean".

    losses: of the float scalars that the model returns.
    Raises PlanError for those that are neither, or not all the same.
    """
    kinds = {rows.kind for rows in losses}
    if kinds <= {Kind.MEAN, Kind.REPLICATE}:
        return "mean"
    if kinds == {Kind.SUM}:
        return "sum"
    cause = next((rows.cause for rows in losses if rows.cause), None)
    why = f": {cause.effect.value} ({cause.operation})" if cause else ""
    raise PlanError(
        'loss_reduction="weighted": fxsched can\'t tell that the loss is a sum, a '
        "mean, or a sum divided by a number that inputs alone "
        f"decide{why}{line_of(cause.stack if cause else None)}\n  return the sum and "
        "the count from the model, and divide after the call: total, count = step(x, "
        "y); (total / count).backward()"
    )
