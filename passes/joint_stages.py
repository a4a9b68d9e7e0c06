"""Stages of a model in which rows of the whole batch meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import networkx as nx

from ..clock.stage_graph import run_stages, step_seconds
from ..ir.graphs import Role
from ..ir.meta import of_node
from ..ir.request import Request
from ..ir.user_line import line_of
from ..jobs.compared import Compared
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..partition.cut_cost import BRANCH, Cut, Problem
from ..partition.joint_memory import check_memory
from ..partition.joint_stages import (
    cut_apart,
    cut_phases,
    phases_of,
    shared_out,
    with_joint,
)
from ..partition.planner import MemoryLimitError, stage_counts, stage_graph
from .cut_problem import Block, cut_problem, named_cut


class Fitted(NamedTuple):
    """A schedule, and the stages that it is for, with estimates of their times.

    compared: with what, where the schedule has candidates.
    """

    schedule: Schedule
    stages: nx.DiGraph[int]
    compared: Compared | None = None


def stages_with_joint(blocks: list[Block], request: Request) -> Fitted:
    """Gives every node a stage, and returns the schedule for them.

    before: z = norm(x); whole = join(z, ..); loss = pairs(whole)
    after:  the same nodes; z in a stage of microbatches, the others in the last stage

    Stages of microbatches are numbered first, as without global-batch ones; what runs
    on all rows comes after them, a stage for each time that rows meet on the way, and
    for each of several long branches. Such branches that nothing in microbatches comes
    before count among the schedule's stages where that makes the step shorter, and run
    where it is shortest, if w knows nothing of them."""
    parts = Parts(blocks)
    every = cut_problem(blocks, request)
    named = None
    if request.stages != "auto":
        named = named_cut(every, blocks, request)
    groups = parts.groups(every, named)
    choices: list[_Choice] = []
    for cut, of in _cuts(blocks, parts, groups, named, request):
        stage = dict(zip(parts.cut, cut, strict=True))
        stage |= {i: len(of) + k for k, group in enumerate(groups) for i in group}
        choices += _placed(stage, every, parts, request.schedule, of)
    errors: list[PlanError] = []
    for best in sorted(choices, key=lambda choice: choice.seconds):
        for i, block in enumerate(blocks):
            for node in block:
                of_node(node)["stage"] = best.stage[i]
        schedule, stages, _ = best.fitted
        try:
            check_memory(schedule, stages, request.memory_limit)
            return best.fitted
        except PlanError as error:
            errors.append(error)
    raise errors[0]


class _Choice(NamedTuple):
    """The stage of each block, the schedule for them, and its step."""

    stage: Mapping[int, int]
    fitted: Fitted
    seconds: float


def _cuts(
    blocks: list[Block],
    parts: Parts,
    groups: Sequence[Sequence[int]],
    named: Cut | None,
    request: Request,
) -> Iterator[tuple[Cut, list[int]]]:
    """Cuts of what runs in microbatches, and which of the schedule's stages each stage
    is of. Before and after rows meet there are other stages, more than the schedule
    has, if that makes the step shorter."""
    before = [parts.phases[i] for i in parts.cut]
    if named is not None:
        yield cut_apart(tuple(named[i] for i in parts.cut), before)
        return
    problem = cut_problem([blocks[i] for i in parts.cut], request)
    schedule, least = request.schedule, len(set(before))
    counts = [schedule.stages]
    if schedule.stages is None and least > 1:  # choose_cut sees a phase alone
        counts = [max(count, least) for count in stage_counts(problem, schedule)]
    branches = sum(parts.alone(group) for group in groups)
    fewer = (schedule.stages or schedule.workers) - branches
    if branches and before and fewer >= least:
        counts.append(fewer)
    if schedule.stages is not None and least > 1 and not schedule.is_open:
        counts += [schedule.stages + more * (least - 1) for more in (1, 2)]
    counts, refused = list(dict.fromkeys(counts)), list[PlanError]()
    for count in counts:
        asked = replace(request, schedule=replace(schedule, stages=count))
        try:
            cut = _cut_within(problem, before, asked)
        except PlanError as error:
            refused.append(error)
            continue
        work = [0.0] * (max(cut, default=-1) + 1)
        for unit, stage in zip(problem.units, cut, strict=True):
            work[stage] += unit.seconds
        yield cut, shared_out(work, schedule.stages or len(work))
    if len(refused) == len(counts):
        raise refused[0]


def _placed(
    stage: Mapping[int, int],
    problem: Problem,
    parts: Parts,
    schedule: Schedule,
    of: Sequence[int],
) -> Iterator[_Choice]:
    """The schedule for these stages, with what reads no stage of microbatches beside
    each of them, where w has no worker for it.

    of: for each stage of microbatches, the schedule's stage that it is of."""
    beside: dict[int, int] = {}  # -1: none
    for i in sorted(parts.whole):
        near = [stage[r] for r in parts.reads[i] if r not in parts.whole]
        beside[stage[i]] = max([beside.get(stage[i], -1), *near])
    stages = stage_graph(problem, tuple(stage[i] for i in range(len(stage))))
    for s in beside:
        stages.nodes[s]["joint"] = True
    places = range(min(len(of), schedule.workers))
    if schedule.is_open or -1 not in beside.values() or not places:
        places = range(1)
    for place in places:
        near_of = {s: place if near < 0 else near for s, near in beside.items()}
        made = with_joint(schedule, near_of, of).fitted(stages)
        events = run_stages(made, stages)
        seconds = step_seconds(events) if events.complete else float("inf")
        yield _Choice(stage, Fitted(made, stages), seconds)


def _cut_within(problem: Problem, phases: Sequence[int], request: Request) -> Cut:
    """A cut within the limit, if there is one where nothing waits for rows to meet;
    check_memory says whether it is one where they do."""
    schedule, limit = request.schedule, request.memory_limit
    if limit is not None:
        try:
            return cut_phases(problem, phases, schedule, limit)
        except MemoryLimitError:
            pass  # what is said of all stages says more
    return cut_phases(problem, phases, schedule, None)


class Parts:
    """The blocks that microbatches run, and those of the whole batch."""

    def __init__(self, blocks: list[Block]) -> None:
        of = {node: i for i, block in enumerate(blocks) for node in block}
        joint = list(map(_is_joint, blocks))
        self.reads = [
            sorted({of[p] for n in block for p in n.all_input_nodes if p in of} - {i})
            for i, block in enumerate(blocks)
        ]
        self.phases = phases_of(self.reads, joint)
        # what of the batch each one comes of, if of nothing that microbatches make
        self.roots: list[frozenset[str] | None] = []
        for block, reads, is_joint in zip(blocks, self.reads, joint, strict=True):
            before = [self.roots[r] for r in reads]
            known = [each for each in before if each is not None]
            inputs = (p for n in block for p in n.all_input_nodes)
            own = (p.name for p in inputs if of_node(p).get("role") is Role.BATCH)
            free = is_joint and len(known) == len(before)
            self.roots.append(frozenset(own).union(*known) if free else None)
        self.cut = [i for i, is_joint in enumerate(joint) if not is_joint]
        self.whole = {i for i, is_joint in enumerate(joint) if is_joint}

    def alone(self, group: Sequence[int]) -> bool:
        """Whether blocks of the whole batch read nothing but inputs of the model."""
        return not any(set(self.reads[i]) - set(group) for i in group)

    def groups(self, problem: Problem, named: Cut | None) -> list[list[int]]:
        """The blocks of the whole batch by stages, in order: those that rows meet as
        often before; and, of those that nothing in microbatches comes before, long
        branches of the graph and stages that are named by themselves."""
        groups: list[list[int]] = []
        for phase in sorted({self.phases[i] for i in self.whole}):
            own: dict[tuple[Any, ...], list[int]] = {}
            for i in (i for i in sorted(self.whole) if self.phases[i] == phase):
                roots = self.roots[i]
                key: tuple[Any, ...] = (1,)
                if roots is not None:
                    key = 0, named[i] if named else 0, len(roots), tuple(sorted(roots))
                own.setdefault(key, []).append(i)
            groups += self._joined([own[key] for key in sorted(own)], problem)
        return groups

    def _joined(self, groups: list[list[int]], problem: Problem) -> list[list[int]]:
        """Groups of one phase, in order, of which those with little work go to the
        first that reads them, or to the only one that they read."""
        least = BRANCH * problem.seconds
        for k in range(len(groups) - 1):
            if sum(problem.units[i].seconds for i in groups[k]) < least:
                later = range(k + 1, len(groups))
                readers = (j for j in later if self._reads(groups[j], groups[k]))
                groups[next(readers, len(groups) - 1)] += groups[k]
                groups[k] = []
        groups = [sorted(group) for group in groups if group]
        last = groups[-1]
        if sum(problem.units[i].seconds for i in last) < least and len(groups) > 1:
            both = sorted(groups[-2] + last)
            if not any(set(self.reads[i]) - set(both) for i in last):
                groups[-2:] = [both]
        return groups

    def _reads(self, readers: Sequence[int], read: Sequence[int]) -> bool:
        return not set(read).isdisjoint(r for i in readers for r in self.reads[i])


def _is_joint(block: Block) -> bool:
    """Whether a block is of the whole batch. Raises PlanError for one that is of
    microbatches too."""
    kinds = {bool(of_node(node).get("joint")) for node in block}
    if len(kinds) > 1:
        node = next(n for n in block if of_node(n).get("joint"))
        raise PlanError(
            "rows of the whole batch meet in an operation that must stay in one stage "
            "with an operation of the "
            f"microbatches{line_of(node.meta.get('stack_trace'))}\n  write nothing in "
            "place there, and leave its module out of same_stage="
        )
    return kinds.pop()
