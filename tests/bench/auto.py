"""schedules.auto against the library, and an annealing that shares no code with it.

Eight models with several encoders, skips or branches (tests/encoders.py). Steps are in
milliseconds of the planner's estimates, of plans in which no worker holds more than
auto's limit: a tenth above what one holds under graph. --file keeps rows, and a command
that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import networkx as nx
from tabulate import tabulate

import fxsched
from fxsched import Placement, Schedule, schedules
from fxsched.jobs.compared import Compared
from fxsched.jobs.job import Direction, Job
from fxsched.jobs.own_caps import OwnCaps
from fxsched.partition.layouts import Layouts
from fxsched.partition.planner import most_held
from fxsched.passes import best_stages

from ..annealing import Blocks, State, anneal, order
from ..encoders import MODELS, asked

MICROBATCHES = 8
ALLOWED = 1.03  # of the best of the others


class Row(NamedTuple):
    """Milliseconds of a step; seconds: that auto took after the trace."""

    model: str
    workers: int
    split: bool
    auto: float
    graph: float
    library: float
    best: str  # of the library
    annealing: float
    seconds: float


def row(model: str, workers: int, split: bool, annealed: float) -> Row:
    """Plans a model; anneals for so many seconds."""
    kept: list[tuple[Compared, Layouts, float]] = []
    compare = best_stages.compare

    def timed(*arguments: Any) -> tuple[Compared, Layouts]:
        began = time.perf_counter()
        found = compare(*arguments)
        kept.append((*found, time.perf_counter() - began))
        return found

    case = asked(model)
    with patch.object(best_stages, "compare", timed):
        schedule = schedules.auto(workers, MICROBATCHES, split)
        fxsched.plan(case.model, schedule, *case.args)
    found, layouts, _ = min(kept, key=lambda each: each[0].best.seconds)
    within, limit = found.within, found.limit
    blocks = blocks_of(layouts, split)

    def fits(state: State) -> bool:
        return most_held(*planned(layouts, blocks, state)) <= limit

    best, *_ = anneal(blocks, MICROBATCHES, workers, fits, annealed)
    graph = next(each for each in found.candidates if each.name == "graph")
    times = found.best.seconds, graph.seconds, within[0].seconds
    auto, graph_ms, library = (1e3 * each for each in times)
    took = sum(seconds for *_, seconds in kept)
    name = within[0].name
    return Row(model, workers, split, auto, graph_ms, library, name, 1e3 * best, took)


def blocks_of(layouts: Layouts, split: bool) -> Blocks:
    """The units of the search, as the annealing takes them."""
    problem, kinds = layouts.problem, layouts.kinds
    place = {unit: i for i, unit in enumerate(layouts.order)}
    units = [problem.units[unit] for unit in layouts.order]
    return Blocks(
        [unit.forward for unit in units],
        [unit.backward for unit in units],
        [
            (place[edge.maker], place[reader], edge.there)
            for edge in problem.edges
            for reader in edge.readers
        ],
        frozenset(place[u] for u, kind in enumerate(kinds) if kind < 0),
        [kinds[unit] for unit in layouts.order],
        split,
    )


def planned(
    layouts: Layouts, blocks: Blocks, state: State
) -> tuple[Schedule, nx.DiGraph[int]]:
    """A state of the annealing as a schedule with its stages."""
    found = order(blocks, state)
    assert found is not None, "it was timed"
    once = {state.stage[u] for u in blocks.once}
    found = [s for s in found if s not in once] + sorted(once)
    new = {s: i for i, s in enumerate(found)}
    stages: nx.DiGraph[int] = nx.DiGraph()
    names = ("forward", "backward", "held", "weights", "gradients", "state", "fetch")
    for s in range(len(found)):
        stages.add_node(s, **dict.fromkeys((*names, "temporary"), 0.0))
    for u, s in zip(layouts.order, state.stage, strict=True):
        data, unit = stages.nodes[new[s]], layouts.problem.units[u]
        for name in names:
            data[name] += getattr(unit, name)
        data["temporary"] = max(data["temporary"], unit.temporary)
    for s in once:
        stages.nodes[new[s]]["joint"] = True
    for a, b, seconds in blocks.edges:
        s, r = new[state.stage[a]], new[state.stage[b]]
        if s != r:
            late = stages.get_edge_data(s, r, {}).get("seconds", 0.0)
            stages.add_edge(s, r, seconds=max(late, seconds))
    return schedule_of(blocks, state, found, layouts.asked), stages


def schedule_of(
    blocks: Blocks, state: State, found: list[int], asked: Schedule
) -> Schedule:
    """w, n and caps of a state; found: its stages, in their order."""
    every, ways = range(asked.microbatches), tuple(Direction)[: blocks.directions]

    def key(job: Job) -> tuple[float, float, int, int]:
        s = found[job.stage]
        rank = state.first[len(ways) * s + ways.index(job.direction)]
        pair = (rank, job.microbatch) if state.by_stage else (job.microbatch, rank)
        return (*pair, s, ways.index(job.direction))

    jobs = [Job(s, b, d) for s in range(len(found)) for b in every for d in ways]
    ranks = {job: i for i, job in enumerate(sorted(jobs, key=key))}
    return Schedule(
        asked.workers,
        asked.microbatches,
        len(found),
        w=lambda s, b, d: Placement(*(state.worker[found[s]],) * 2),
        n=lambda s, b, d: ranks[Job(s, b, d)],
        in_flight=OwnCaps(lambda s: state.cap[found[s]]),
        split_backward=blocks.split,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    add("--workers", type=int, nargs="+", default=[2, 4, 8], dest="each")
    add("--seconds", type=float, default=60.0, help="of each annealing (60)")
    add("--split", nargs="+", choices=["no", "yes"], default=["no", "yes"])
    add("--file", type=Path, help="keeps rows, for a command that goes on")
    parser.set_defaults(run=run, workers=0)


def run(options: argparse.Namespace) -> int:
    """1 if auto is behind in a row."""
    known: dict[tuple[Any, ...], Row] = {}
    if options.file and options.file.exists():
        lines = options.file.read_text().splitlines()
        known = {r[:3]: r for r in (Row(*json.loads(line)) for line in lines)}
    rows = []
    for model in options.models:
        for workers in options.each:
            for split in options.split:
                key = model, workers, split == "yes"
                if key not in known:
                    known[key] = row(*key, options.seconds)
                    _keep(options.file, known[key])
                rows.append(known[key])
    print(table(rows))
    return int(any(_ratio(each) > ALLOWED for each in rows))


def _keep(file: Path | None, row: Row) -> None:
    if file:
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def _ratio(row: Row) -> float:
    return row.auto / min(row.library, row.annealing)


def table(rows: list[Row]) -> str:
    cells = [
        (
            each.model,
            each.workers,
            "yes" if each.split else "no",
            f"{each.auto:.1f}",
            f"{each.graph:.1f}",
            f"{each.library:.1f} {each.best}",
            f"{each.annealing:.1f}",
            f"{_ratio(each):.3f}",
            f"{each.seconds:.1f}",
        )
        for each in rows
    ]
    headers = ["model", "W", "split", "auto ms", "graph", "library", "annealing"]
    return tabulate(cells, [*headers, "ratio", "planning s"], disable_numparse=True)
