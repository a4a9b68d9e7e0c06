"""Stages for a schedule that has candidates: the best of them, and what a search over
cuts and placements makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from random import Random

import networkx as nx

from ..ir.meta import of_node
from ..ir.request import Request
from ..jobs.compared import OWN, Compared, Planned
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..partition.cut_cost import Cut
from ..partition.layouts import WORTH, Layouts
from ..partition.planner import MemoryLimitError, most_held, moved_seconds, stage_graph
from .cut_problem import Block, cut_problem
from .joint_stages import Fitted, Parts
from .recompute_within import fit_within, unmark

# A candidate brings these to the schedule that has it.
BRINGS = ("w", "n", "in_flight", "fit", "split_backward", "in_order", "cut")
ABOVE = 4  # candidates that are tried with blocks that B computes again
AGAIN = 0.4  # effort of a search from candidates that one has found
MORE = 1.1  # of what the first candidate holds, where no limit is given

Fit = Callable[[Request], Fitted]


def best_stages(blocks: list[Block], request: Request, fit: Fit) -> Fitted:
    """Gives each node a stage, and returns the schedule for them, with what was
    compared.

    before: a schedule with candidates, such as schedules.auto
    after:  the nodes with meta["stage"], and a schedule for exactly these stages

    fit: plans one candidate. Raises PlanError if no candidate can be planned.
    """
    compared, _ = compare(blocks, request, fit)
    if compared.best.bytes > compared.limit:
        raise _too_large(compared)
    schedule = replace(compared.best.schedule, name=request.schedule.name)
    fitted = pinned_stages(blocks, replace(request, schedule=schedule))
    return fitted._replace(compared=compared)


def pinned_stages(blocks: list[Block], request: Request) -> Fitted:
    """Gives each node the stage that the schedule's cut says.

    Raises PlanError for the cut of another model.
    """
    schedule, joint = request.schedule, set[int]()
    assert schedule.cut is not None
    if request.stages != "auto":
        raise PlanError(
            "stages= names where stages begin, and the schedule has a cut of its own; "
            "leave stages= out, or give dataclasses.replace(schedule, cut=None)"
        )
    nodes = {node.name: node for block in blocks for node in block}
    if other := sorted(nodes.keys() ^ schedule.cut.keys()):
        what = "has no stage for" if other[0] in nodes else "has a stage for"
        raise PlanError(
            f"the schedule's cut {what} {other[0]}: it was made for another model, or "
            "another release of PyTorch; search again, or give "
            "dataclasses.replace(schedule, cut=None)"
        )
    for name, node in nodes.items():
        of_node(node)["stage"] = schedule.cut[name]
        if of_node(node).get("joint"):
            joint.add(schedule.cut[name])
    cut = tuple(schedule.cut[block[0].name] for block in blocks)
    stages = stage_graph(cut_problem(blocks, request), cut)
    for stage in joint:
        stages.nodes[stage]["joint"] = True
    return Fitted(schedule, stages)


def best_within(blocks: list[Block], request: Request, fit: Fit) -> Fitted:
    """The same where B may compute blocks again to stay within the limit of memory."""
    nodes = [node for block in blocks for node in block]
    refused: list[PlanError] = []
    compared, _ = compare(blocks, request, fit)
    above = [each for each in compared.candidates if each not in compared.within]
    found: list[tuple[float, Request]] = []
    for each in (compared.best, *above[:ABOVE]):
        schedule = replace(each.schedule, name=request.schedule.name)
        asked = replace(request, schedule=schedule)
        try:
            seconds = moved_seconds(*fit_within(nodes, asked, fit)[:2])
        except PlanError as error:
            refused.append(error)
            continue
        finally:
            unmark(nodes)
        found.append((seconds, asked))
    if not found:
        raise min(refused, key=lambda error: getattr(error, "least", inf))
    _, asked = min(found, key=lambda each: each[0])
    return fit_within(nodes, asked, fit)._replace(compared=compared)


def compare(
    blocks: list[Block], request: Request, fit: Fit
) -> tuple[Compared, Layouts]:
    """Plans the candidates, and searches from them; the best is the one that holds the
    least, where all hold more than the limit. Raises as best_stages."""
    parts, problem = Parts(blocks), cut_problem(blocks, request)
    whole = parts.groups(problem, None) if parts.whole else []
    planned, cuts, refused = list[Planned](), list[Cut](), list[PlanError]()
    wanted = request.schedule.stages
    for candidate in request.schedule.candidates:
        if wanted is not None and candidate.stages not in (None, wanted):
            text = f"{candidate.name} has {candidate.stages} stages, not {wanted}"
            refused.append(PlanError(f"{text}; give candidates of as many"))
            continue
        try:
            fitted = fit(replace(request, schedule=_asked(request, candidate)))
        except PlanError as error:
            refused.append(error)
            continue
        cuts.append(tuple(of_node(block[0])["stage"] for block in blocks))
        name = candidate.name or "candidate"
        planned.append(_planned(blocks, name, cuts[-1], *fitted[:2]))
    if not planned:
        raise refused[0]
    limit = request.memory_limit or MORE * planned[0].bytes
    known = all(each.cut is not None for each in request.schedule.candidates)
    effort = AGAIN if known else 1.0
    layouts = Layouts(problem, request.schedule, parts.phases, whole, limit, effort)
    ranked = sorted(range(len(planned)), key=lambda i: planned[i].seconds)
    starts = (
        layouts.start(cuts[i], planned[i].schedule, planned[i].stages) for i in ranked
    )
    best = next((planned[i] for i in ranked if planned[i].bytes <= limit), None)
    seconds = inf if best is None else best.seconds
    found = layouts.search([s for s in starts if s is not None], Random(0), seconds)
    if found is not None:
        own = _planned(blocks, OWN, found.cut, found.schedule, found.stages)
        if best is None or own.seconds < best.seconds * (1 - WORTH):
            best = own
    if best is None:
        best = min(planned, key=lambda each: each.bytes)
    rows = tuple(planned[i] for i in ranked)
    return Compared(best, rows, layouts.tried, limit), layouts


def _too_large(compared: Compared) -> MemoryLimitError:
    least = compared.best
    return MemoryLimitError(
        f"memory_limit={compared.limit:.0f}: every plan that was tried holds more, the "
        f"least {least.bytes:.0f} bytes, by {least.name}; raise the limit, or use more "
        "workers or smaller microbatches",
        least.bytes,
    )


def _asked(request: Request, candidate: Schedule) -> Schedule:
    """The schedule that is asked for, with what the candidate brings."""
    asked = request.schedule
    brings = {name: getattr(candidate, name) for name in BRINGS}
    return replace(
        asked,
        **brings,
        stages=candidate.stages or asked.stages,
        u=candidate.u or asked.u,
        name=candidate.name,
        candidates=(),
    )


def _planned(
    blocks: list[Block],
    name: str,
    cut: Cut,
    schedule: Schedule,
    stages: nx.DiGraph[int],
) -> Planned:
    """A schedule with its cut, timed."""
    names = {
        node.name: stage
        for block, stage in zip(blocks, cut, strict=True)
        for node in block
    }
    seconds, size = moved_seconds(schedule, stages), most_held(schedule, stages)
    fixed = replace(schedule, stages=len(stages), cut=names, fit=None)
    return Planned(name, fixed, stages, seconds, size)
