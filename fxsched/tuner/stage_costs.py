"""What a search knows of stages: their times and sizes, by how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple, cast

import networkx as nx

from ..clock.joint import out_of_order
from ..clock.network import Wires
from ..jobs.compared import Planned
from ..jobs.job import PlanError
from ..jobs.schedule import Schedule
from ..jobs.user_values import positive
from ..plans.plan import Plan

LOOPS = 4  # stages a worker, at most
JOBS = 40_000  # of a placement; more stages a worker make more of them


class Costs(NamedTuple):
    """Stages by their number.

    bytes: whether their sizes are bytes; else activations.
    edges: whether edges may have `seconds` of their own.
    unit: of times, "s" for seconds.
    plan: plans a model by a schedule, if the stages are estimates for one.
    compared: schedules with their stages and cuts, that the planner compared.
    network: what messages go through, where plans say it.
    microbatches: how many a plan of the model has: with ragged="fewer" not those that
        were asked for.
    """

    graphs: dict[int, nx.DiGraph[int]]
    bytes: bool
    edges: bool
    unit: str = ""
    plan: Callable[[Schedule], Plan] | None = None
    compared: tuple[Planned, ...] = ()
    network: Wires | None = None
    microbatches: int | None = None


def counts(stages: int | Sequence[int] | None, workers: int, jobs: int) -> list[int]:
    """How many stages to compare: multiples of the workers unless given.

    jobs: those of one stage.
    """
    if stages is not None:
        several = isinstance(stages, Iterable) and not isinstance(stages, str)
        counts: list[Any] = list(cast(Any, stages)) if several else [stages]
        for count in counts or [0]:
            positive("search", stages=count)
        return list(map(int, counts))
    every = range(workers, LOOPS * workers + 1, workers)
    return [count for count in every if count == workers or count * jobs <= JOBS]


def of_durations(
    durations: Mapping[str, Any], workers: int, wanted: Sequence[int]
) -> Costs:
    """Chains of equal stages, each with its share of the work and of an activation;
    or, of times for each stage, that chain."""
    if not {"F", "B"} <= set(durations) <= {"F", "B", "W"}:
        raise PlanError(
            f"search({dict(durations)}): give times of F, B and, if B is to be split, "
            'W, as {"F": 1, "B": 1, "W": 1}'
        )
    lists = {d: x for d, x in durations.items() if isinstance(x, Sequence)}
    sizes = {len(x) for x in lists.values()}
    if len(sizes) > 1 or (lists and len(lists) < len(durations)) or 0 in sizes:
        raise PlanError(
            "search: give every direction one time, or a list with a time for each "
            f"stage, of one length; here are {dict(durations)}"
        )
    chains = {}
    for count in sizes or wanted:
        share = 1.0 if lists else workers / count
        chain: nx.DiGraph[int] = nx.DiGraph()
        for s in range(count):
            times = {d: share * _time(durations[d], s) for d in durations}
            whole = times["B"] + times.get("W", 0.0)
            chain.add_node(s, forward=times["F"], backward=whole)
            chain.nodes[s].update(held=workers / count, weights=0.0)
            if "W" in times:
                chain.nodes[s]["weight"] = times["W"]
        nx.add_path(chain, range(count))
        chains[count] = chain
    return Costs(chains, bytes=False, edges=False)


def _time(times: Any, stage: int) -> float:
    value = times[stage] if isinstance(times, Sequence) else times
    if not isinstance(value, (int, float)) or not isfinite(value) or value < 0:
        raise PlanError(f"search: {value!r} is not a time; give numbers of 0 or more")
    return float(value)


def of_graph(stages: nx.DiGraph[int]) -> Costs:
    """These stages alone. Those without `held` count one activation each."""
    if sorted(stages) != list(range(len(stages))) or not len(stages):
        raise PlanError(
            f"search: the stages are {sorted(stages)[:5]}; number them from 0"
        )
    if out_of_order(stages):
        raise PlanError("search: number the stages in the order of data flow")
    sized_stages = stages.copy()
    sized = any("held" in data for _, data in sized_stages.nodes(data=True))
    for s, data in sized_stages.nodes(data=True):
        if "forward" not in data or "backward" not in data:
            raise PlanError(
                f"search: stage {s} has no `forward` and `backward`; give its node "
                "these times"
            )
        data.setdefault("held", 0.0 if sized else 1.0)
        data.setdefault("weights", 0.0)
    return Costs({len(sized_stages): sized_stages}, bytes=sized, edges=True)
