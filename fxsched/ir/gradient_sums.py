"""The sum of a group's gradients, of all workers that give some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..clock.weight_traffic import sum_root
from . import ops
from .graphs import Group, Specs
from .step_ir import Line, Made, Running, StepIR


def root_of(group: Group, number: int) -> int:
    """The worker that a group's gradients are summed on: the one that updates it, or
    one of its owners, each group another."""
    return sum_root(group.owners, number) if group.updater is None else group.updater


def in_type(specs: Specs, dtype: torch.dtype | None) -> Specs:
    """Of gradients in the type that they are added up in; None for their own."""
    if dtype is None:
        return specs
    return tuple(spec._replace(dtype=dtype) for spec in specs)


def cast_line(
    step: StepIR, where: Line, total: Running | Line | Made, specs: Specs, name: str
) -> Line | None:
    """The line that puts gradients into these types, on the worker and in the task of
    another; None where they are in them."""
    if step.specs(total)[0] == specs:
        return None
    args = (total, tuple(spec.dtype for spec in specs))
    return Line(where.worker, where.task, where.n, ops.cast, args, specs, name)


def finished(
    step: StepIR, where: Line, total: Running | Line | Made, group: int
) -> Line | None:
    """The line that casts a sum to the types of its weights, for .grad, the update and
    the norms that it is clipped by; None where it has them."""
    weights = step.weight_inputs[group].meta["specs"]
    pairs = zip(weights, step.facts.groups[group].trained, strict=True)
    specs = tuple(spec for spec, trained in pairs if trained)
    name = f"finished_{group}"
    return cast_line(step, where, total, specs, name)


def sum_gradients(
    step: StepIR, running: Sequence[Running], n: int
) -> tuple[Running | Line, list[Line]]:
    """The sum of what workers' jobs leave of a group's gradients, in the types of the
    weights, and the lines that make it: none, if it is on its root already.

    running: of one group and one round.
    """
    group, number = running[0].group, running[0].round
    root = root_of(step.facts.groups[group], group)
    parts = tuple(sorted(running, key=lambda key: key.worker))
    own = Running("gradients", group, root, number)
    task = f"reduce {group}" + f" of round {number}" * (step.every is not None)
    if parts == (own,):
        cast = finished(step, Line(root, task, n), own, group)
        return (own, []) if cast is None else (cast, [cast])
    args = (parts.index(own) if own in parts else 0, *parts)
    specs, _ = step.specs(parts[0])
    line = Line(root, task, n, ops.reduce, args, specs, f"gradients_{group}", group)
    cast = finished(step, line, line, group)
    return (line, [line]) if cast is None else (cast, [line, cast])


def next_jobs(
    lines: Sequence[Line], wanted: Iterable[Line], workers: Iterable[int]
) -> dict[tuple[Line, int], Line]:
    """For each wanted line and each worker, the worker's next job; the line itself, if
    there is none."""
    starts, workers = set(wanted), tuple(workers)
    coming: dict[int, Line] = {}
    following = {}
    for line in reversed(lines):
        if line in starts:
            following.update({(line, w): coming.get(w, line) for w in workers})
        if line.job is not None:
            coming[line.worker] = line
    return following
