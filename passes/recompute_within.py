"""Chooses what B computes again, so that workers stay within a limit of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from ..accounts.paper import held_memory
from ..clock.activations import peaks
from ..clock.stage_graph import likely_seconds, run_stages
from ..clock.timeline import Timeline
from ..ir.graphs import module_prefixes
from ..ir.meta import note, of_node
from ..ir.request import Request
from ..jobs.job import PlanError
from ..partition.joint_memory import check_memory
from .joint_stages import Fitted
from .recompute import Regions, marked

ROUNDS = 12  # of cutting the model anew


Fit = Callable[[Request], Fitted]  # gives nodes their stages


def fit_within(nodes: Sequence[fx.Node], request: Request, fit: Fit) -> Fitted:
    """Stages of which no worker holds more than request.memory_limit, by estimates.

    Either the model is cut for the limit, or blocks are marked that B computes again,
    those first that free the most bytes for the time that they take, or both: whichever
    has the shortest predicted step. Raises PlanError if none stays within the limit.
    """
    limit = request.memory_limit or 0.0
    found: list[tuple[float, Request, tuple[fx.Node, ...]]] = []
    refused: list[PlanError] = []

    def note_choice(asked: Request, marks: Sequence[fx.Node]) -> None:
        try:
            fitted = fit(asked)
            check_memory(*fitted[:2], limit)  # which stages that are named may not meet
            seconds = likely_seconds(*fitted[:2])
        except PlanError as error:
            refused.append(error)
        else:
            found.append((seconds, asked, tuple(marks)))

    note_choice(request, ())
    free, marks = replace(request, memory_limit=None), list[fx.Node]()
    for _ in range(ROUNDS):
        fitted = fit(free)
        events = run_stages(*fitted[:2])
        over = _over(fitted, events, limit)
        if not over:
            note_choice(free, marks)
            break
        more = list(_more(nodes, fitted, events, over))
        if not more:
            break
        _mark(more)
        marks += more
    note_choice(request, marks)
    unmark(marks)
    if not found:
        raise refused[-1]
    _, asked, chosen = min(found, key=lambda choice: choice[0])
    _mark(chosen)
    return fit(asked)


def unmark(nodes: Sequence[fx.Node]) -> None:
    """Has B compute none of these nodes again."""
    for node in nodes:
        of_node(node).pop("recompute", None)


def _mark(nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        note(node, recompute=_block(node))


def _block(node: fx.Node) -> str | None:
    """The block of a model that a node is in: a numbered module, or its own."""
    names = module_prefixes(node)
    numbered = (name for name in names if name.rpartition(".")[2].isdigit())
    return next(numbered, names[-1] if names else None)


def _over(fitted: Fitted, events: Timeline, limit: float) -> dict[int, float]:
    """Bytes above the limit, by worker."""
    held = held_memory(*fitted[:2], events)
    excess = {worker: each.total - limit for worker, each in enumerate(held)}
    return {worker: size for worker, size in excess.items() if size > 0}


def _more(
    nodes: Sequence[fx.Node],
    fitted: Fitted,
    events: Timeline,
    over: dict[int, float],
) -> Iterator[fx.Node]:
    """The nodes of further blocks of stages on these workers."""
    apart = (n for n in nodes if of_node(n)["mutates"] or of_node(n).get("joint"))
    whole = {None, *map(_block, apart)}  # blocks that run once

    def of(node: fx.Node) -> Any:
        block, stage = _block(node), of_node(node).get("stage")
        again = marked(node) is not None or block in whole or stage is None
        return None if again else (stage, block)

    regions = Regions(nodes, of)  # stage and block
    kept: dict[Any, float] = {}
    for node, size in regions.kept.items():
        kept[of(node)] = kept.get(of(node), 0.0) + size
    chosen, counts = set[Any](), _in_flight(fitted, events)
    for worker, excess in over.items():
        gains = {
            region: counts[region[0]][worker] * (size - kept.get(region, 0.0))
            for region, size in regions.rebuilt.items()
        }
        best = sorted(gains, key=lambda r: gains[r] / (regions.seconds[r] or 1.0))
        while excess > 0 and best:
            region = best.pop()
            if gains[region] > 0:
                excess -= gains[region]
                chosen.add(region)
    yield from (node for node in nodes if of(node) in chosen)


def _in_flight(fitted: Fitted, events: Timeline) -> dict[int, list[float]]:
    """By stage, the most microbatches of it that each worker holds."""
    release, stages = fitted.schedule.release, [s for s, _ in events.jobs.kinds]
    return {
        s: peaks(events, release, [float(each == s) for each in stages])
        for s in fitted.stages
    }
