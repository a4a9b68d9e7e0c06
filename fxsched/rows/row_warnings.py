"""What is said of a loss that microbatches do not make up, before its first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard

from ..ir.user_line import line_of
from .kinds import Cause, Effect, Kind, Rows


class RowsWarning(UserWarning):
    """The losses or outputs of microbatches do not make up those of the whole batch."""


REMEDIES = {
    Effect.STATISTICS: (
        "each microbatch has statistics of its own; layers that normalise each row "
        "(GroupNorm, LayerNorm) do not depend on the cut"
    ),
    Effect.PAIRS: "rows meet those of their own microbatch only",
    Effect.RATIO: (
        'write fxsched.backend(schedule, loss_reduction="weighted"): then the weights '
        "are the whole batch's"
    ),
    Effect.CONSTANT: (
        "it is added once for each microbatch; add it after the call, or make the loss "
        "a mean"
    ),
    Effect.ORDER: "each microbatch does so by itself; fxsched.verify shows it",
    Effect.BOTH: "divide the sum by the batch size, or multiply the mean by it",
}
OTHERWISE = "each microbatch does it by itself"


def of_loss(rows: Rows, reduction: str, microbatches: int) -> Iterator[str]:
    """What the user should know of the loss, if anything."""
    if rows.kind is Kind.UNKNOWN:
        return
    if _known(rows.cause):
        yield of_cause("the loss", rows.cause, microbatches)
    if rows.kind is Kind.SUM and reduction == "mean":
        yield (
            'the loss is a sum over the batch, but loss_reduction="mean" takes the '
            f"mean of its {microbatches} microbatches: it and its gradients are "
            f"1/{microbatches} of eager's\n"
            '  write fxsched.backend(schedule, loss_reduction="sum")'
        )
    if rows.kind is Kind.MEAN and reduction == "sum":
        yield (
            'the loss is a mean over the batch, but loss_reduction="sum" adds up its '
            f"{microbatches} microbatches: it and its gradients are {microbatches} "
            "times eager's\n"
            "  leave loss_reduction out, or return a sum"
        )


def of_output(position: int, rows: Rows, microbatches: int) -> Iterator[str]:
    """What the user should know of an output that has a row for each sample."""
    if rows.kind is Kind.APART and _known(rows.cause):
        yield of_cause(f"output {position}", rows.cause, microbatches)
    elif rows.kind is Kind.APART and rows.numbers:
        yield (
            f"output {position} has the numbers of the rows in each of {microbatches} "
            "microbatches, not in the whole batch; make it after the call"
        )


def _known(cause: Cause | None) -> TypeGuard[Cause]:
    return cause is not None and cause.effect is not Effect.UNSURE


def of_labels(least: int, most: int, ignored: int, stack: str | None) -> str:
    return (
        f"the loss is a mean over the labels that are not {ignored}, of which "
        f"microbatches have from {least} to {most}, so the mean of the microbatches is "
        f"not eager's loss{line_of(stack)}\n  {REMEDIES[Effect.RATIO]}"
    )


def of_cause(what: str, cause: Cause, microbatches: int) -> str:
    sure = "is not" if cause.effect is not Effect.ORDER else "may not be"
    return (
        f"{what} of {microbatches} microbatches {sure} eager's on the whole batch: "
        f"{cause.effect.value} ({cause.operation}){line_of(cause.stack)}\n"
        f"  {REMEDIES.get(cause.effect, OTHERWISE)}"
    )


def complaints(
    rows: Sequence[Rows | None], loss: int | None, reduction: str, microbatches: int
) -> list[str]:
    """For the outputs of a model: the loss first, each cause once."""
    found: list[str] = []
    if loss is not None and (own := rows[loss]) is not None:
        found += of_loss(own, reduction, microbatches)
    seen = {own.cause for own in [rows[loss]] if own} if loss is not None else set()
    for position, each in enumerate(rows):
        if each is None or position == loss or each.cause in seen - {None}:
            continue
        found += of_output(position, each, microbatches)
        seen.add(each.cause)
    return found
