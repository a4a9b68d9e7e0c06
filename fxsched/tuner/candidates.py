"""The schedules that a search compares: the library with all its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import networkx as nx

from ..clock.jobs import weights_stay
from ..clock.stage_graph import stage_jobs
from ..jobs.job import Direction, Job, Placement, PlanError
from ..jobs.schedule import Schedule
from ..schedules import LIBRARY, STALE, replicate

FORWARD = Direction.FORWARD
Graphs = Mapping[int, "nx.DiGraph[int]"]  # by how many stages they have


class Candidate(NamedTuple):
    """A schedule with the stages that it is for, and its parameters in words.

    made: the schedule before it was fitted to the stages, for the planner.
    """

    name: str
    parameters: str
    schedule: Schedule
    stages: nx.DiGraph[int]
    made: Schedule


SYNCHRONOUS = [name for name in LIBRARY if name not in (*STALE, "auto")]


def library(
    workers: int, microbatches: int, graphs: Graphs, copies: bool
) -> Iterator[Candidate]:
    """Every schedule of the library with every parameter that suits, but for those that
    train with stale weights, which are another way to train.

    graphs: the stages that are compared, by their number.
    copies: whether to compare copies of pipelines side by side (replicate) too.
    """
    for name in SYNCHRONOUS:
        yield from _built(name, workers, microbatches, graphs)
    if not copies:
        return
    for groups in range(2, workers):
        if workers % groups or microbatches % groups:
            continue
        for name in SYNCHRONOUS:
            size = workers // groups, microbatches // groups
            for inner in _built(name, *size, graphs):
                if moves_weights(inner.schedule, inner.stages):
                    continue  # more of what hsdp and sharded_groups are
                copied = replicate(inner.schedule, groups)
                made = replicate(inner.made, groups)
                words = ", ".join(filter(None, (f"groups={groups}", inner.parameters)))
                yield inner._replace(
                    name=f"{groups} x {name}",
                    parameters=words,
                    schedule=copied,
                    made=made,
                )


def _built(
    name: str, workers: int, microbatches: int, graphs: Graphs
) -> Iterator[Candidate]:
    """One constructor's schedules, each once."""
    make, seen = LIBRARY[name], set[tuple[str, int]]()
    values: dict[str, Sequence[object]] = {
        "workers": [workers],
        "microbatches": [microbatches],
        "group_size": [r for r in range(2, workers) if workers % r == 0],
        "even": [False, True],
        "stages": [*graphs, None],
    }
    takes = inspect.signature(make).parameters
    open_ones = [p.name for p in takes.values() if p.default is p.empty]
    if not values.keys() >= set(open_ones):
        return
    names = [argument for argument in takes if argument in values]
    for chosen in product(*(values[argument] for argument in names)):
        arguments = dict(zip(names, chosen, strict=True))
        try:
            schedule = make(**arguments)
        except PlanError:
            continue  # parameters that don't suit each other
        words = _words(arguments)
        for stages in _stages(schedule, graphs):
            if (words, len(stages)) not in seen:
                seen.add((words, len(stages)))
                fitted = schedule.fitted(stages)
                fitted = replace(fitted, stages=len(stages), name=schedule.name)
                yield Candidate(name, words, fitted, stages, schedule)


def _words(arguments: Mapping[str, object]) -> str:
    said = ("group_size", "even")
    return ", ".join(f"{k}={v}" for k, v in arguments.items() if k in said and v)


def _stages(schedule: Schedule, graphs: Graphs) -> list[nx.DiGraph[int]]:
    """The graphs that a schedule is for; its first if it leaves the number open."""
    if schedule.stages is None:
        return [next(iter(graphs.values()))]
    return [graphs[schedule.stages]] if schedule.stages in graphs else []


def moves_weights(schedule: Schedule, stages: nx.DiGraph[int]) -> bool:
    """Whether weights are fetched, or gradients of several workers added up."""
    return not weights_stay(stage_jobs(schedule, stages))


class Placed(NamedTuple):
    """Where stages run: the worker of each F, and how to call that."""

    name: str
    schedule: Schedule
    stages: nx.DiGraph[int]


def placements(
    candidates: Sequence[Candidate], graphs: Graphs, workers: int, microbatches: int
) -> list[Placed]:
    """Those of the candidates, each once, and stages in turns and folded."""
    last = 2 * workers - 1
    by_place: dict[tuple[int, tuple[int, ...]], Placed] = {}

    def add(name: str, schedule: Schedule, stages: nx.DiGraph[int]) -> None:
        place, every = schedule.place, range(microbatches)
        where = tuple(place(Job(s, b, FORWARD)).compute for s in stages for b in every)
        by_place.setdefault((len(stages), where), Placed(name, schedule, stages))

    for count, stages in graphs.items():
        turns = Schedule(
            workers, microbatches, count, lambda s, b, d: Placement(*(s % workers,) * 2)
        )
        add("in turns", turns, stages)
        if count == 2 * workers:
            fold = replace(turns, w=lambda s, b, d: Placement(*(min(s, last - s),) * 2))
            add("folded", fold, stages)
    for name, _, schedule, stages, _ in candidates:
        add(f"as in {name}", schedule, stages)
    return list(by_place.values())
