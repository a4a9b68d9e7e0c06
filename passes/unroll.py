"""Writes every job of every worker as one line, in the global order."""

from __future__ import annotations

import operator

from torch import fx

from ..clock.event_loop import Kind
from ..ir import ops
from ..ir.request import Request
from ..ir.step_ir import Layout, Line, Recipe, Running
from ..jobs import Direction, Job, Placement


def unroll_jobs(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """A line for each job, on its worker.

    before: forward_0 = self.forward_0((weights_0,), (x,), None)     # of any microbatch
            gm.meta["jobs"] = [0F0, 0F1, 1F0, ..]
    after:  0F0                                                      # worker 0
            0F1                                                      # worker 1
            1F0                                                      # worker 0

    gm.meta["layout"] says which nodes a job's line stands for, gm.meta["running"] which
    job is the last on its worker to add to a group's gradients or to write its buffers.
    If B runs in backward(), each worker pauses before the first B.
    """
    layout = _layout(gm)
    placements: dict[Job, Placement] = gm.meta["placements"]
    n: dict[Job, int] = gm.meta["n"]
    parts = [
        [layout.parts[node] for node in recipe.nodes if node in layout.parts]
        for recipe in layout.recipes
    ]
    late = gm.meta["loss"] is None  # B runs in backward()
    lines: list[Line] = []
    pauses: list[Line] = []
    running: dict[Running, Line] = {}  # in the order of their last jobs
    jobs: list[Job] = gm.meta["jobs"]
    for job in jobs:
        worker = placements[job].compute
        if late and job.direction is not Direction.FORWARD and not pauses:
            every = range(request.schedule.workers)
            pauses = [Line(each, "pause", n[job], ops.pause) for each in every]
            lines += pauses
        line = Line(worker, str(job), n[job], job=job)
        lines.append(line)
        for what, group in parts[layout.jobs.at[job.stage, job.direction]]:
            key = Running(what, group, worker)
            running.pop(key, None)
            running[key] = line
    gm.meta.update(layout=layout, lines=lines, pauses=pauses, running=running)
    return gm


def _layout(gm: fx.GraphModule) -> Layout:
    before, after = _by_call(gm.graph)
    calls: dict[Kind, fx.Node] = {
        (node.meta["stage"], node.meta["direction"]): node
        for node in gm.graph.find_nodes(op="call_module")
    }
    jobs = gm.meta["timeline"].jobs
    recipes = tuple(
        Recipe(tuple(before.get(call, ())), call, tuple(after.get(call, ())))
        for call in map(calls.__getitem__, jobs.kinds)
    )
    maker = {node: kind for kind, recipe in enumerate(recipes) for node in recipe.nodes}
    parts = {}
    for (_, direction), recipe in zip(jobs.kinds, recipes, strict=True):
        what = "buffers" if direction is Direction.FORWARD else "gradients"
        for node in recipe.nodes:
            if node.meta.get("group") is not None:
                parts[node] = (what, node.meta["group"])
    return Layout(jobs, recipes, maker, parts)


def _by_call(
    graph: fx.Graph,
) -> tuple[dict[fx.Node, list[fx.Node]], dict[fx.Node, list[fx.Node]]]:
    """The nodes that run just before and just after each call.

    Parts of a call's result come after it. A sum of gradients comes before the call
    that reads it, or, if there's none, after the last call that it reads from.
    """
    before: dict[fx.Node, list[fx.Node]] = {}
    after: dict[fx.Node, list[fx.Node]] = {}
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            made[node] = node
        elif node.op == "call_function":
            reader = _reading_call(node)
            if node.target is operator.getitem or reader is None:
                made[node] = next(made[p] for p in node.all_input_nodes)
                after.setdefault(made[node], []).append(node)
            else:
                before.setdefault(reader, []).append(node)
                made[node] = reader
    return before, after


def _reading_call(node: fx.Node) -> fx.Node | None:
    calls = [user for user in node.users if user.op == "call_module"]
    if calls:
        return calls[0]
    found = [_reading_call(u) for u in node.users if u.op == "call_function"]
    return next((call for call in found if call is not None), None)
