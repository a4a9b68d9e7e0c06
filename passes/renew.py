"""Copies of weights that another worker's optimizer has stepped since the last call."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ..clock.weight_fetches import source_of
from ..ir import ops
from ..ir.request import Request
from ..ir.step_ir import Line, Message, StepIR


def renew_copies(step: StepIR, request: Request) -> StepIR:
    """Where the user's loop steps the optimizer, on the worker that u names: the
    others' copies of the weights are renewed before the first job that may read them.

    before: 0F1                                                      # worker 1
    after:  weights_0_new = renew(weights_0)                         # worker 1
            0F1                                                      # worker 1

    step.renewed says from where; step.updated has what jobs read then. Where the
    program steps it, copies are as new as their originals.
    """
    if step.every is not None or request.updates:
        return step
    weights, jobs = step.weight_inputs, step.jobs
    missing = {
        (number, owner)
        for number, group in enumerate(step.facts.groups)
        for owner in group.owners
        if group.updater not in (None, owner)
    }
    updated: dict[tuple[int, int, int], Line] = {}
    renewed: dict[Line, tuple[int, Line | fx.Node]] = {}
    lines: list[Line | Message] = []
    for line in step.lines if missing else ():
        assert isinstance(line, Line), "no messages so far"
        if line.job is None:  # a sum of gradients
            lines.append(line)
            continue
        number = jobs.number(line.job)
        here = jobs.keeper[number], jobs.worker[number]
        for group, owner in sorted(missing):
            keepers = step.facts.groups[group]
            reads = line.job.stage in keepers.stages
            if not reads or owner != source_of(keepers.owners, *here):
                continue
            missing.remove((group, owner))
            node, task = weights[group], f"renew {group}"
            args, specs, name = (node,), node.meta["specs"], f"{node.name}_new"
            new = Line(owner, task, line.n, ops.renew, args, specs, name, group)
            assert keepers.updater is not None
            renewed[new] = (keepers.updater, node)
            updated[group, 0, owner] = new
            lines.append(new)
        lines.append(line)
    return replace(step, lines=lines or step.lines, updated=updated, renewed=renewed)
