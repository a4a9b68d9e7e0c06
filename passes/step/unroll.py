"""Writes every job of every worker as one op, in the global order."""

from __future__ import annotations

import operator
from dataclasses import replace

from torch import fx

from ...clock.jobs import source_of
from ...ir.graphs import arguments
from ...ir.joint import is_pointer, resolve
from ...ir.meta import of_call
from ...ir.request import Request
from ...ir.step import Credit, JobOutput, Op, Recipe, Step, Value, Weights
from ...jobs.job import Direction


def unroll_jobs(step: Step, request: Request) -> Step:
    """An op for each job, on its worker, which reads weights from one that keeps them.

    before: forward_0 = self.forward_0((weights_0,), (x,), None)     # of any microbatch
            a = forward_0[0]
            forward_1 = self.forward_1((weights_1,), (a,), None)
            step.order: 0F0, 0F1, 1F0, ..
    after:  0F0, weights_0 of worker 0                               # worker 0
            0F1, weights_0 of worker 1                               # worker 1
            1F0, weights_1 of worker 0, a_0                          # worker 0

    step.recipes says which nodes a job's op stands for, step.reads what these read. A
    capped F comes after the credit of a B (or W). F reads buffers as F before it on its
    worker has left them; step.buffers has what the last one leaves.
    """
    step = replace(step, recipes=_recipes(step.graph))
    jobs, owners = step.jobs, [group.owners for group in step.facts.groups]
    reads = [arguments(recipe.call)[0] for recipe in step.recipes]
    places: dict[tuple[int, int, int], tuple[Weights, ...]] = {}
    buffers: dict[tuple[int, int], JobOutput] = {}
    ops: list[Op] = []
    for i in step.order:
        job, kind, here = jobs.job(i), jobs.kind[i], jobs.worker[i]
        op, b = Op(here, str(job), jobs.n[i], job=job), job.microbatch
        ops.append(op)
        if job.direction is Direction.UPDATE:
            continue
        place = kind, jobs.keeper[i], here
        if place not in places:
            places[place] = tuple(
                Weights(w, source_of(owners[of_call(w)["group"]], *place[1:]))
                for w in reads[kind]
            )
        weights: tuple[Value, ...] = places[place]
        if job in step.credits:
            op.after = (Credit(step.credits[job]),)
        if job.direction is Direction.FORWARD:
            if buffers:
                left = ((w, (of_call(w.node)["group"], here)) for w in places[place])
                weights = tuple(buffers.get(key, w) for w, key in left)
            for node in step.gives[kind]:
                buffers[of_call(node)["group"], here] = JobOutput(node, b)
        made = tuple([JobOutput(*resolve(node, b)) for node in step.reads[kind]])
        op.args = (weights, made)
    return replace(step, lines=ops, buffers=buffers)


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
