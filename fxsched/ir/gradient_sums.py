"""The sum of a group's gradients, of all workers that give some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..clock.weight_traffic import sum_root
from . import ops
from .graphs import Group
from .step_ir import Line, Running, StepIR


def root_of(group: Group, number: int) -> int:
    """The worker that a group's gradients are summed on: the one that updates it, or
    one of its owners, each group another."""
    return sum_root(group.owners, number) if group.updater is None else group.updater


def sum_gradients(
    step: StepIR, running: Sequence[Running], n: int
) -> tuple[Running | Line, list[Line]]:
    """The sum of what workers' jobs leave of a group's gradients, and the lines that
    make it: none, if all is on its root already.

    running: of one group and one round.
    """
    group, number = running[0].group, running[0].round
    root = root_of(step.facts.groups[group], group)
    parts = tuple(sorted(running, key=lambda key: key.worker))
    own = Running("gradients", group, root, number)
    if parts == (own,):
        return own, []
    args = (parts.index(own) if own in parts else 0, *parts)
    specs, _ = step.specs(parts[0])
    task = f"reduce {group}" + f" of round {number}" * (step.every is not None)
    line = Line(root, task, n, ops.reduce, args, specs, f"gradients_{group}", group)
    return line, [line]


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
