"""Stages for a schedule that has candidates: the best of them, and what a search over
cuts and placements makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from ..ir.meta import of_node
from ..ir.request import Request
from ..jobs.job import PlanError
from ..partition.layouts import Layouts
from ..partition.planner import MemoryLimitError, most_held, moved_seconds
from .cut_problem import Block, cut_problem
from .joint_stages import Fitted, Parts

# A candidate brings these to the schedule that has it.
BRINGS = ("stages", "w", "n", "in_flight", "fit", "split_backward", "in_order", "u")
MORE = 1.1  # of what the first candidate holds, where no limit is given
OWN = "auto"
WORTH = 0.005  # of a step, that the search must save

Fit = Callable[[Request], Fitted]


class Planned(NamedTuple):
    """A candidate with the stage of each block."""

    name: str
    cut: Sequence[int]
    fitted: Fitted
    seconds: float
    bytes: float


class Compared(NamedTuple):
    """The best, the candidates by their steps, and the layouts that were searched."""

    best: Planned
    ranked: Sequence[Planned]
    layouts: Layouts


def best_stages(blocks: list[Block], request: Request, fit: Fit) -> Fitted:
    """Gives each node a stage, and returns the schedule for them, with what was
    compared.

    before: a schedule with candidates, such as schedules.auto
    after:  the nodes with meta["stage"], and a schedule for exactly these stages

    fit: plans one candidate. Raises PlanError if no candidate can be planned.
    """
    compared = compare(blocks, request, fit)
    best = compared.best
    for block, stage in zip(blocks, best.cut, strict=True):
        for node in block:
            of_node(node)["stage"] = stage
    schedule = replace(best.fitted.schedule, name=request.schedule.name)
    return Fitted(schedule, best.fitted.stages, _text(compared))


def compare(blocks: list[Block], request: Request, fit: Fit) -> Compared:
    """Plans the candidates, and searches from them. Raises as best_stages."""
    planned, refused = _candidates(blocks, request, fit)
    if not planned:
        raise refused[0]
    limit = request.memory_limit or MORE * planned[0].bytes
    parts, problem = Parts(blocks), cut_problem(blocks, request)
    whole = parts.groups(problem, None) if parts.whole else []
    layouts = Layouts(problem, request.schedule, parts.phases, whole, limit)
    ranked = sorted(planned, key=lambda each: each.seconds)
    starts = [layouts.start(each.cut, *each.fitted[:2]) for each in ranked]
    found = layouts.search([each for each in starts if each is not None], Random(0))
    within = [each for each in ranked if each.bytes <= limit]
    best = within[0] if within else None
    if found is not None:
        own = Fitted(found.schedule, found.stages)
        seconds, size = moved_seconds(*own[:2]), most_held(*own[:2])
        if best is None or seconds < best.seconds * (1 - WORTH):
            best = Planned(OWN, found.cut, own, seconds, size)
    if best is None:
        least = min(planned, key=lambda each: each.bytes)
        raise MemoryLimitError(
            f"memory_limit={limit:.0f}: every plan that was tried holds more; the "
            f"least holds {least.bytes:.0f} bytes, by {least.name}; raise the limit, "
            "or use more workers or smaller microbatches",
            least.bytes,
        )
    return Compared(best, ranked, layouts)


def _candidates(
    blocks: list[Block], request: Request, fit: Fit
) -> tuple[list[Planned], list[PlanError]]:
    """The candidates that can be planned, and why others can't."""
    planned, refused, asked = list[Planned](), list[PlanError](), request.schedule
    for candidate in asked.candidates:
        brings = {name: getattr(candidate, name) for name in BRINGS}
        brings["u"] = brings["u"] or asked.u
        schedule = replace(asked, **brings, name=candidate.name, candidates=())
        try:
            fitted = fit(replace(request, schedule=schedule))
        except PlanError as error:
            refused.append(error)
            continue
        cut = [of_node(block[0])["stage"] for block in blocks]
        seconds, size = moved_seconds(*fitted[:2]), most_held(*fitted[:2])
        planned.append(Planned(candidate.name or "", cut, fitted, seconds, size))
    return planned, refused


def _text(compared: Compared) -> str:
    """What was compared, for people."""

    def named(some: Sequence[Planned]) -> str:
        return ", ".join(f"{each.name} {each.seconds * 1e3:.4g} ms" for each in some)

    best, ranked, layouts = compared
    limit = layouts.limit
    within = [each for each in ranked if each.bytes <= limit]
    above = [each for each in ranked if each.bytes > limit]
    took = best.name if best.name != OWN else "one of these layouts"
    text = (
        f"{layouts.tried} layouts were compared with schedules of the library: "
        f"{named(within) or 'none'}; taken: {took}, {best.seconds * 1e3:.4g} ms"
    )
    if above:
        text += f"\nleft out, above {limit / 2**20:.4g} MiB on a worker: {named(above)}"
    return text
