"""Runs the passes, top to bottom, and keeps the result as a Plan."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, overload

import networkx as nx
import torch
from torch import fx

from . import show
from .arithmetic import Arithmetic, describe_arithmetic
from .check import check_programs
from .compare import compare
from .diagram import Diagram
from .eventloop import Event, Timeline
from .examine import Summary, examine
from .graphs import Group, Output, Role, State, tensors
from .jobs import Direction, Job, Placement, PlanError, Schedule
from .lines import Layout, Line, Message
from .links import Link
from .measure import Known, Profile, fit, known
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
from .request import Request
from .simulate import Durations, Simulation, run_placed
from .stages import credits, in_its_order

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


class Programs(Sequence[fx.GraphModule]):
    """A program per worker, each written when it is first asked for."""

    def __init__(self, workers: int, write: Callable[[int], fx.GraphModule]) -> None:
        self._write = write
        self._written: list[fx.GraphModule | None] = [None] * workers

    def __len__(self) -> int:
        return len(self._written)

    @overload
    def __getitem__(self, worker: int) -> fx.GraphModule: ...
    @overload
    def __getitem__(self, worker: slice) -> list[fx.GraphModule]: ...
    def __getitem__(self, worker: int | slice) -> Any:
        if isinstance(worker, slice):
            return [self[i] for i in range(*worker.indices(len(self)))]
        worker = range(len(self))[worker]
        program = self._written[worker]
        if program is None:
            program = self._written[worker] = self._write(worker)
        return program


@dataclass(frozen=True)
class Plan:
    """Programs for all workers, and what they were made from.

    stages: a networkx.DiGraph; nodes have `modules` (names), `parameters` (numbers in
        them), `flops` (of one microbatch's F); edges have `bytes` (per microbatch).
    jobs: all jobs in the global order.
    programs: a torch.fx.GraphModule per worker, written when it is asked for.
    loss: position of the output that B starts from in the call itself, or None.
    timeline: when each job should run, in seconds.
    lines: the step of all workers; see fxsched/lines.py.
    nodes: what was known of the model's operations, by the names that profiles use.
    draws: whether jobs draw random numbers. redraws: whether B draws those of an F that
        ran on another worker.
    half: whether gradients are computed in float16, where small ones flush to 0.
    inputs: of the traced graph, those that are no state of the model.
    arithmetic: what the model computes, to compare with other ranks'.
    """

    schedule: Schedule
    stages: nx.DiGraph[int]
    jobs: tuple[Job, ...]
    programs: Sequence[fx.GraphModule]
    placements: dict[Job, Placement]
    groups: tuple[Group, ...]
    outputs: tuple[Output, ...]
    loss: int | None
    timeline: Timeline
    lines: Sequence[Line | Message] = ()
    notes: tuple[str, ...] = ()
    nodes: Mapping[str, Known] = field(default_factory=dict)
    inputs: tuple[State, ...] = ()
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    draws: bool = False
    redraws: bool = False
    half: bool = False

    @property
    def trains(self) -> bool:
        """Whether there are B jobs."""
        return any(job.direction is Direction.BACKWARD for job in self.jobs)

    def table(self, rank: int) -> str:
        """The program of one worker: a row for each job and each piece of transfer."""
        return show.program_table(self.programs[rank], rank)

    def explain(self) -> str:
        """Stages and workers with their work and memory, and what limits the step."""
        return show.explain_text(self.schedule, self.stages)

    def simulate(
        self,
        durations: Durations = None,
        transfer: float | Link | None = None,
        prefetch: int | None = None,
    ) -> Simulation:
        """The step on a virtual clock, in seconds, each worker in its planned order.

        durations: None for those that the plan was made with; a measured timeline, for
            the median of each stage and direction; or what fxsched.simulate takes, as
            for transfer (None: as estimated) and prefetch.
        """
        fixed = replace(self.schedule, in_order=True, in_flight=None)
        jobs = self.timeline.jobs
        room = {} if self.loss is None else credits(self.schedule, self.timeline)
        jobs = in_its_order(jobs, [jobs.number(job) for job in self.jobs], room)
        stages = self.stages.copy()
        return run_placed(fixed, stages, jobs, durations, transfer, prefetch)

    def diagram(self) -> Diagram:
        """A picture of the step as it was planned."""
        return self.simulate().diagram("s")

    def profile(self, *timelines: Sequence[Event]) -> Profile:
        """What the model's operations take where they ran, from steps of this plan.

        timelines: backend.timeline of a few steps. The times that the plan was made
        with are scaled so that F and B of each stage take what they took in these, at
        the median; a plan made with the profile balances its stages by that.
        Raises PlanError for timelines that aren't of a whole step of this plan.
        """
        for timeline in timelines or ((),):
            if Counter(event.job for event in timeline) != Counter(self.jobs):
                raise PlanError(
                    "Plan.profile: give backend.timeline of one or more whole steps of "
                    f"this plan, with each of its {len(self.jobs)} jobs once; here are "
                    f"{len(timeline)} events"
                )
        return fit(self.nodes, timelines)

    def compare(self, timeline: Sequence[Event]) -> str:
        """Where the plan and a measured timeline, as backend.timeline, part: the step,
        each worker's order, durations by stage and direction, and the largest waits.

        Raises PlanError if they are of other jobs.
        """
        return compare(self.timeline, timeline)

    def check(self) -> None:
        """Raises CheckError unless the programs are sound; see fxsched.check."""
        check_programs(self.programs, self.placements, self.groups)

    def examine(self, rank: int) -> Summary:
        """What one worker's program shows by itself, and what the others need to know
        of it, for fxsched.check.check_summaries."""
        return examine(rank, self.programs[rank], self.placements, self.groups)

    @property
    def digest(self) -> str:
        """Equal for equal plans that compute the same, in any process; writes no
        programs."""
        text = hashlib.sha256(self.arithmetic.digest.encode())
        head = show.plan_head(self.schedule, self.stages, self.groups, self.notes)
        for part in (*head, *self.lines):
            text.update(f"{part!s}\n".encode())
        return text.hexdigest()

    @cached_property
    def _text(self) -> str:
        head = show.plan_head(self.schedule, self.stages, self.groups, self.notes)
        return show.plan_text(head, self.programs)

    def __str__(self) -> str:
        return self._text


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
