"""How the microbatches' values of an output become what the user gets.

What can be known is: rows are joined, a value that no row of the batch went into is
the same in all, a size follows from the batch's, sums and means over rows are told by
the operations that make them. Of other numbers the user says what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ..ir.graphs import Output
from ..ir.request import OutputReduction
from ..jobs.job import PlanError
from ..rows.kinds import Kind, Rows
from .batch import Batch

REDUCTIONS = get_args(OutputReduction)
Name = int | str


class TracedOutput(NamedTuple):
    """What is known of a tensor that Dynamo's graph returns.

    name: its index or key in what the user gets, or the attribute that it is stored in.
    returned: whether the user gets it, and not only an attribute.
    value: a microbatch's, fake.
    sizes: the whole batch's, in symbols.
    origins: which of "batch", "random" and "state" (that the model writes) it comes of.
    rows: what became of the rows of the batch in it.
    where: the user's line that makes it.
    """

    name: Name
    returned: bool
    value: Tensor
    sizes: Sequence[Any]
    origins: frozenset[str]
    rows: Rows | None
    where: str

    @property
    def known(self) -> str | None:
        """What microbatches' values become, if that is known: the batch's value is
        their mean or sum."""
        if self.rows is None or self.rows.cause or "state" in self.origins:
            return None
        return {Kind.MEAN: "mean", Kind.SUM: "sum"}.get(self.rows.kind)


def describe(traced: TracedOutput, batch: Batch, how: str | None) -> Output:
    """How the microbatches' values of an output are put together.

    how: what the user says, or None. What may be the loss is left to `decide`.
    Raises PlanError for what cannot be put together, or not as the user says.
    """
    output = Output(
        "rows", differentiable=traced.value.requires_grad, name=traced.name, how=how
    )
    dims = [i for i, size in enumerate(traced.sizes) if batch.changes(size)]
    if dims:
        mixed = traced.rows is not None and traced.rows.outer > 1
        if len(dims) > 1 or mixed or not batch.joins(traced.sizes[dims[0]]):
            raise _apart(traced, batch)
        if how is not None:
            raise PlanError(
                f"backend(outputs={{{traced.name!r}: {how!r}}}): it has a value or row "
                "for each sample, and comes back whole; leave it out"
            )
        return output._replace(dim=dims[0])
    if how is not None:
        _possible(traced, how)
        return output._replace(kind="one" if how == "last" else "folded")
    if not traced.origins or traced.origins == {"state"}:
        last = "last" if traced.origins else None
        return output._replace(kind="one", how=last)
    return output._replace(kind="scalar", how=traced.known)


def decide(
    outputs: Sequence[Output], traced: Mapping[int, TracedOutput]
) -> list[Output]:
    """The outputs, of which one scalar may be the loss; others are an error.

    The loss is the only output, or named so, or the one scalar that needs a gradient.
    Raises PlanError with the line to write for all that the user has to decide.
    """
    scalars = [
        i for i, each in enumerate(outputs) if each.kind == "scalar" or each.joint
    ]
    floats = [
        i
        for i in scalars
        if traced[i].value.dim() == 0
        and traced[i].value.is_floating_point()
        and traced[i].returned
    ]
    named = [i for i in floats if str(traced[i].name).split(".")[-1] == "loss"]
    trained = [i for i in floats if outputs[i].differentiable]
    alone = floats if sum(each.returned for each in traced.values()) == 1 else []
    loss = next((g for g in (named, trained, alone) if len(g) == 1), [])
    apart = [i for i in scalars if i not in loss and not outputs[i].joint]
    unknown = [i for i in apart if outputs[i].how is None]
    if unknown:
        raise _undecided([traced[i] for i in unknown])
    decided = list(outputs)
    for i in scalars:
        if i in loss:
            decided[i] = outputs[i]._replace(kind="scalar", how=None)
        elif i in apart:
            decided[i] = outputs[i]._replace(kind="folded")
    return decided


def _undecided(traced: Sequence[TracedOutput]) -> PlanError:
    lines = "".join(
        f"\n  {_called(each)}, {_shape(each)}, made at\n    {each.where}"
        for each in traced
    )
    example = {
        each.name: "mean" if each.value.is_floating_point() else "sum"
        for each in traced
    }
    return PlanError(
        "each microbatch gives a value of its own of outputs that have no row for each "
        f"sample:{lines}\nsay how they become one: backend(outputs={example!r}), where "
        f"each may be {', '.join(map(repr, REDUCTIONS[:-1]))} or 'last' (that of the "
        "last microbatch)"
    )


def _called(traced: TracedOutput) -> str:
    if traced.returned:
        return f"output {traced.name!r}"
    return f"{traced.name}, which the model assigns to"


def _shape(traced: TracedOutput) -> str:
    kind = str(traced.value.dtype).removeprefix("torch.")
    return f"{kind}{list(traced.value.shape)}"


def _apart(traced: TracedOutput, batch: Batch) -> PlanError:
    """What to say of a value that samples of different microbatches meet in."""
    sizes = []
    for size in traced.sizes:
        text = str(size)
        for symbol in batch.symbols:
            text = text.replace(str(symbol), "batch")
        sizes.append(text)
    return PlanError(
        f"{_called(traced)}, has shape ({', '.join(sizes)}), made at\n"
        f"    {traced.where}\n"
        "microbatches cannot be put together to that: it is of all pairs of samples, "
        "or its rows are not sample after sample; return a tensor with one row for "
        "each sample, and compute this from it outside of the model"
    )


def _possible(traced: TracedOutput, how: str) -> None:
    """Raises PlanError for a reduction that a type doesn't have."""
    dtype = traced.value.dtype
    ordered = not dtype.is_complex
    has = {
        "mean": dtype.is_floating_point or dtype.is_complex,
        "sum": dtype != torch.bool,
        "max": ordered,
        "min": ordered,
    }
    if not has.get(how, True):
        raise PlanError(
            f"backend(outputs={{{traced.name!r}: {how!r}}}): it is {_shape(traced)}, "
            f"which has no {how}; give another of {', '.join(REDUCTIONS)}"
        )
