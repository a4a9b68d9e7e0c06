"""Writes every job of every worker as one line, in the global order."""

from __future__ import annotations

import operator
from dataclasses import replace

from torch import fx

from ..ir.joint import is_pointer
from ..ir.request import Request
from ..ir.step_ir import Line, Recipe, Running, StepIR
from ..jobs.job import Direction


def unroll_jobs(step: StepIR, request: Request) -> StepIR:
    """A line for each job, on its worker.

    before: forward_0 = self.forward_0((weights_0,), (x,), None)     # of any microbatch
            step.order: 0F0, 0F1, 1F0, ..
    after:  0F0                                                      # worker 0
            0F1                                                      # worker 1
            1F0                                                      # worker 0

    step.recipes says which nodes a job's line stands for, step.running which job is the
    last on its worker to add to a group's gradients or to write its buffers.
    """
    step = replace(step, recipes=_recipes(step.graph))
    parts = [
        [step.parts[node] for node in recipe.nodes if node in step.parts]
        for recipe in step.recipes
    ]
    jobs = step.jobs
    lines: list[Line] = []
    running: dict[Running, Line] = {}
    for i in step.order:
        job, worker = jobs.job(i), jobs.worker[i]
        line = Line(worker, str(job), jobs.n[i], job=job)
        lines.append(line)
        if job.direction is Direction.UPDATE:
            continue
        for what, group in parts[jobs.kind[i]]:
            if what == "gradients" and request.deterministic:
                continue
            number = step.round(job.microbatch) if what == "gradients" else 0
            key = Running(what, group, worker, number)
            running.pop(key, None)
            running[key] = line
    return replace(step, lines=lines, running=running)


def _recipes(gm: fx.GraphModule) -> tuple[Recipe, ...]:
    """What a job of each kind is made of; kinds are in the order of their calls."""
    before, after = _by_call(gm.graph)
    return tuple(
        Recipe(tuple(before.get(call, ())), call, tuple(after.get(call, ())))
        for call in gm.graph.nodes
        if call.op == "call_module"
    )


def _by_call(
    graph: fx.Graph,
) -> tuple[dict[fx.Node, list[fx.Node]], dict[fx.Node, list[fx.Node]]]:
    """The nodes that run just before and just after each call.

    Parts of a call's result come after it. A sum of gradients comes before the call
    that reads it, or, if there's none, after the last call that it reads from.
    """
    before: dict[fx.Node, list[fx.Node]] = {}
    after: dict[fx.Node, list[fx.Node]] = {}
    calls: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls[node] = node
        elif node.op == "call_function" and not is_pointer(node):
            reader = _reading_call(node)
            if node.target is operator.getitem or reader is None:
                calls[node] = next(calls[p] for p in node.all_input_nodes)
                after.setdefault(calls[node], []).append(node)
            else:
                before.setdefault(reader, []).append(node)
                calls[node] = reader
    return before, after


def _reading_call(node: fx.Node) -> fx.Node | None:
    calls = [user for user in node.users if user.op == "call_module"]
    if calls:
        return calls[0]
    readers = [_reading_call(u) for u in node.users if u.op == "call_function"]
    return next((call for call in readers if call is not None), None)
