"""Runs the passes, top to bottom: a traced microbatch becomes a Plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .costmodel.measure import known
from .ir.graphs import Role, State, tensors
from .ir.request import Request
from .ir.step_ir import Layout
from .jobs import Direction, Job, Placement, PlanError
from .passes.collect import collect_results
from .passes.cut import cut_program
from .passes.differentiate import differentiate_stages
from .passes.frees import free_values
from .passes.order import order_jobs
from .passes.partition import assign_stages
from .passes.share import copy_shared
from .passes.split import split_stages
from .passes.transfer import insert_transfers
from .passes.unroll import unroll_jobs
from .passes.weights import fetch_weights
from .plans.arithmetic import describe_arithmetic
from .plans.plan import Plan, Programs

PASSES = (
    assign_stages,  # every node gets a stage
    copy_shared,  # cheap values where they are read
    split_stages,  # one node per stage
    differentiate_stages,  # forward and backward calls
    order_jobs,  # one global order of jobs
    unroll_jobs,  # one line per job, on its worker
    collect_results,  # outputs, sums of gradients, buffers
    fetch_weights,  # weights that are kept elsewhere
    insert_transfers,  # messages
)


def make_plan(gm: fx.GraphModule, request: Request, passes: tuple[Any, ...]) -> Plan:
    """The plan of a traced microbatch; the user's passes run on each program."""
    nodes = list(gm.graph.nodes)
    inputs = tuple(
        State(node.meta["index"], node.meta["role"], node.meta["name"])
        for node in nodes
        if node.meta.get("role") in (Role.BATCH, Role.SHARED)
    )
    arithmetic = describe_arithmetic(gm, request, passes)
    for each in PASSES:
        gm = each(gm, request)
        request = replace(request, schedule=gm.meta["schedule"])

    def write(worker: int) -> fx.GraphModule:
        graph = free_values(cut_program(gm, request, worker), request)
        program = fx.GraphModule(gm, graph, "Program")
        for own in passes:
            program = own(program, request)
            if not isinstance(program, fx.GraphModule):
                raise PlanError(
                    f"the pass {own!r} must return each program that it is given"
                )
        return program

    notes = []
    jobs: list[Job] = gm.meta["jobs"]
    split = any(job.direction is Direction.BACKWARD for job in jobs)
    if split and gm.meta["loss"] is None and request.schedule.in_flight is not None:
        notes.append(
            "in_flight is not applied: the model returns no scalar loss, so all F run "
            "in the call and all B in backward()"
        )
    return Plan(
        request.schedule,
        gm.meta["stages"],
        tuple(jobs),
        Programs(request.schedule.workers, write),
        gm.meta["placements"],
        tuple(gm.meta["groups"]),
        tuple(gm.meta["outputs"]),
        gm.meta["loss"],
        gm.meta["timeline"],
        gm.meta["lines"],
        tuple(notes),
        known(nodes),
        inputs,
        arithmetic,
        *_draws(gm),
        half=any(
            t.dtype is torch.float16 and t.requires_grad
            for node in nodes
            for t in tensors(node.meta.get("val"))
        ),
    )


def _draws(gm: fx.GraphModule) -> tuple[bool, bool]:
    """Plan.draws and Plan.redraws."""
    layout: Layout = gm.meta["layout"]
    kinds = layout.jobs.kinds
    drawing = {
        kind
        for kind, recipe in zip(kinds, layout.recipes, strict=True)
        if recipe.call.meta["draw"] is not None
    }
    again = {stage for stage, d in drawing if d is Direction.BACKWARD}
    placements: dict[Job, Placement] = gm.meta["placements"]
    apart = any(
        place.compute != placements[Job(stage, b, Direction.FORWARD)].compute
        for (stage, b, direction), place in (placements.items() if again else ())
        if stage in again and direction is Direction.BACKWARD
    )
    return bool(drawing), apart
