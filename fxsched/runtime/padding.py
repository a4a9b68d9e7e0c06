"""Batches that do not divide into microbatches, filled up with their last sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor, fx

from ..capture.batch import resized
from ..capture.samples import BatchInput, samples_of
from ..ir.graphs import result
from ..ir.request import Request
from ..ir.step import Op
from ..jobs.job import PlanError
from ..plans.plan import Plan


class Padded(NamedTuple):
    """A call with as many samples as microbatches divide.

    args: with the last sample again and again after it.
    samples: those of the user's.
    all: those with what was added.
    """

    args: tuple[Any, ...]
    samples: int
    all: int

    def trimmed(self, outputs: Sequence[Any], plan: Plan) -> list[Any]:
        """The outputs without the rows of what was added. No gradient comes back for
        these, so that B adds nothing of them."""
        results = []
        for value, output in zip(outputs, plan.outputs, strict=True):
            if output.kind == "rows":
                assert output.dim is not None
                length = value.shape[output.dim] * self.samples // self.all
                value = value.narrow(output.dim, 0, length)
            results.append(value)
        return results


def pad(gm: fx.GraphModule, args: tuple[Any, ...], request: Request) -> Padded | None:
    """The call with a batch that divides; None if it does already."""
    count = request.schedule.microbatches
    samples, cut = samples_of(gm, args, request)
    if samples < 2 or samples % count == 0:
        return None
    every = -(-samples // count) * count
    new = {e.input: _filled(args[e.input], e, samples, every) for e in cut}
    return Padded(resized(gm, args, new), samples, every)


def _filled(tensor: Tensor, entry: BatchInput, samples: int, every: int) -> Tensor:
    """before: a, b, c  # of three samples, for two microbatches
    after:  a, b, c, c"""
    assert entry.dim is not None
    rows = entry.length // samples
    last = tensor.detach().narrow(entry.dim, entry.length - rows, rows)
    return torch.cat([tensor, *[last] * (every - samples)], entry.dim)


def check_padded(gm: fx.GraphModule, plan: Plan) -> None:
    """Raises PlanError for a model that would tell what was added from what wasn't."""
    instead = (
        "use fxsched.backend(schedule, ragged='fewer'), or DataLoader(drop_last=True)"
    )
    sizes = [getattr(node, "meta", {}).get("example_value") for node in result(gm)]
    for output, size in zip(plan.outputs, sizes, strict=True):
        if output.kind not in ("rows", "constant", "one") or isinstance(size, SymInt):
            raise PlanError(
                "backend(ragged='pad') adds samples to the batch, and drops their rows "
                "from outputs with a row for each sample, but the model returns "
                f"{_said(output.kind)}; {instead}, or compute the loss outside the "
                "model"
            )
    if any(joint for _, joint in plan.stages.nodes(data="joint")):
        raise PlanError(
            "backend(ragged='pad') adds samples to the batch, and in this model they "
            "would change the results of the other samples, since rows of the whole "
            f"batch meet; {instead}"
        )
    tasks = [line.task for line in plan.lines if isinstance(line, Op)]
    if any(task.startswith("buffers ") for task in tasks):
        raise PlanError(
            "backend(ragged='pad') adds samples to the batch, and the model would "
            f"count them in the buffers that it writes, such as BatchNorm's; {instead}"
        )


def _said(kind: str) -> str:
    return "a scalar" if kind == "scalar" else "a value of the whole batch"
