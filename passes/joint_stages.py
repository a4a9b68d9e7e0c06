"""Stages of a model in which rows of the whole batch meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import networkx as nx
from torch import fx

from ..ir.graphs import tensors
from ..ir.request import Request
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..partition.cut_cost import Cut, Problem
from ..partition.joint_memory import check_memory
from ..partition.joint_stages import cut_apart, cut_phases, phases_of, with_joint
from ..partition.planner import MemoryLimitError, stage_graph
from .cut_problem import Block, cut_problem, named_cut


class Fitted(NamedTuple):
    """A schedule, and the stages that it is for, with estimates of their times."""

    schedule: Schedule
    stages: nx.DiGraph[int]


def stages_with_joint(blocks: list[Block], request: Request) -> Fitted:
    """Gives every node a stage, and returns the schedule for them.

    before: z = norm(x); whole = join(z, ..); loss = pairs(whole)
    after:  the same nodes; z in a stage of microbatches, the others in the last stage

    Stages of microbatches are numbered first, as without joint ones; what runs on all
    rows comes after them, a stage for each time that rows meet on the way.
    """
    parts = _Parts(blocks)
    problem = cut_problem([blocks[i] for i in parts.cut], request)
    before = [parts.phases[i] for i in parts.cut]
    if request.stages == "auto":
        cut = _cut_within(problem, before, request)
    else:
        named = named_cut(problem, [blocks[i] for i in parts.cut], request)
        cut = cut_apart(named, before)
    count = max(cut, default=-1) + 1
    stage = dict(zip(parts.cut, cut, strict=True)) | parts.numbered(count)
    for i, block in enumerate(blocks):
        for node in block:
            node.meta["stage"] = stage[i]
    beside: dict[int, int] = {}
    for i in parts.whole:
        near = [stage[r] for r in parts.reads[i] if r not in parts.whole]
        beside[stage[i]] = max([beside.get(stage[i], 0), *near])
    schedule = with_joint(request.schedule, beside, count + len(beside))
    stages = _stages_of(blocks, stage, parts.whole, request)
    schedule = schedule.fitted(stages)
    read = _bytes_read(blocks, len(stages))
    check_memory(schedule, stages, read, request.carry, request.memory_limit)
    return Fitted(schedule, stages)


def _cut_within(problem: Problem, phases: Sequence[int], request: Request) -> Cut:
    """A cut within the limit, if there is one where nothing waits for rows to meet;
    check_memory says whether it is one where they do."""
    schedule, limit = request.schedule, request.memory_limit
    if limit is not None and request.carry == "saved":
        try:
            return cut_phases(problem, phases, schedule, limit)
        except MemoryLimitError:
            pass  # what is said of all stages says more
    return cut_phases(problem, phases, schedule, None)


def _bytes_read(blocks: list[Block], count: int) -> dict[int, float]:
    """What each stage reads of others in one job."""
    read: dict[int, set[fx.Node]] = {s: set() for s in range(count)}
    for node in (node for block in blocks for node in block):
        stage = node.meta["stage"]
        read[stage].update(
            p for p in node.all_input_nodes if p.meta.get("stage", stage) != stage
        )
    return {
        s: float(sum(t.nbytes for p in nodes for t in tensors(p.meta["val"])))
        for s, nodes in read.items()
    }


class _Parts:
    """The blocks that microbatches run, and those of the whole batch."""

    def __init__(self, blocks: list[Block]) -> None:
        of = {node: i for i, block in enumerate(blocks) for node in block}
        joint = list(map(_is_joint, blocks))
        self.reads = [
            sorted({of[p] for n in block for p in n.all_input_nodes if p in of} - {i})
            for i, block in enumerate(blocks)
        ]
        self.phases = phases_of(self.reads, joint)
        self.cut = [i for i, is_joint in enumerate(joint) if not is_joint]
        self.whole = {i for i, is_joint in enumerate(joint) if is_joint}

    def numbered(self, first: int) -> dict[int, int]:
        """The stages of the blocks of the whole batch."""
        phases = sorted({self.phases[i] for i in self.whole})
        number = {phase: first + k for k, phase in enumerate(phases)}
        return {i: number[self.phases[i]] for i in sorted(self.whole)}


def _stages_of(
    blocks: list[Block],
    stage: Mapping[int, int],
    joint: set[int],
    request: Request,
) -> nx.DiGraph[int]:
    """The stages, as schedules see them."""
    problem = cut_problem(blocks, request)
    stages = stage_graph(problem, tuple(stage[i] for i in range(len(blocks))))
    for i in joint:
        stages.nodes[stage[i]]["joint"] = True
    return stages


def _is_joint(block: Block) -> bool:
    """Whether a block is of the whole batch. Raises PlanError for one that is of
    microbatches too."""
    kinds = {bool(node.meta.get("joint")) for node in block}
    if len(kinds) > 1:
        node = next(n for n in block if n.meta.get("joint"))
        raise PlanError(
            "rows of the whole batch meet in what must stay with an operation of "
            f"microbatches{line_of(node.meta.get('stack_trace'))}\n  write it without "
            "writing in place, and keep same_stage away from it"
        )
    return kinds.pop()
