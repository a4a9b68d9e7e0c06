"""Copies of weights that another worker's optimizer has stepped since the last call."""

from __future__ import annotations

from dataclasses import replace

from ...ir import ops
from ...ir.meta import of_call
from ...ir.request import Request
from ...ir.step import Message, Op, Step, Weights, replace_values


def renew_copies(step: Step, request: Request) -> Step:
    """Where the user's loop steps the optimizer, on the worker that u names: the
    others' copies of the weights are renewed before the first job that reads them.

    before: 0F1, weights_0 of worker 1                               # worker 1
    after:  weights_0_new = renew(weights_0 of 1, weights_0 of 0)    # worker 1
            0F1, weights_0_new                                       # worker 1

    Where the program steps it, copies are as new as their originals.
    """
    groups = step.facts.groups
    if step.every is not None or request.updates:
        return step
    if all(group.updater is None for group in groups):
        return step
    new: dict[Weights, Op] = {}
    lines: list[Op | Message] = []
    for op in step.ops:
        for old in op.args[0]:
            if not isinstance(old, Weights) or old in new:
                continue
            number = of_call(old.node)["group"]
            updater = groups[number].updater
            if updater in (None, old.worker):
                continue
            assert updater is not None
            args, name = (old, Weights(old.node, updater)), f"{old.node.name}_new"
            where = (old.worker, f"renew {number}", op.n)
            specs = of_call(old.node)["specs"]
            new[old] = Op(*where, ops.renew, args, specs, name, number)
            lines.append(new[old])
        replace_values(op, new)
        lines.append(op)
    return replace(step, lines=lines)
