"""Encoders beside a trunk: the schedules made for them against 1F1B, and search.

A trunk of as many stages as workers reads one encoder, or three with half, a quarter
and a quarter of their work, in as many stages together. B takes twice as long as F;
frozen encoders have none. Adapters are frozen encoders whose last stages are trained,
before a frozen trunk, through which B takes as long as F. 1F1B is of the same layers in
a row, four to a stage, cut as evenly as they can be. Steps are in seconds of one worker
that does all work of a microbatch; activations in layers' outputs of such seconds of F.
Transfers take no time.
"""

from __future__ import annotations

import argparse
from itertools import accumulate, product
from typing import Literal, NamedTuple, get_args

import networkx as nx
from tabulate import tabulate

import fxsched
from fxsched import Schedule, schedules
from fxsched.clock.activations import peaks
from fxsched.schedules.trunk import encoder_stages

LAYERS = 4  # of a stage
ALLOWED = 0.03  # what caps of encoders may cost
NAMES = ("1f1b", "graph", "bubble_filled", "nested")
WIDTHS = {1: (1.0,), 3: (0.5, 0.25, 0.25)}  # of the encoders, in all their stages


State = Literal["trained", "frozen", "adapters"]


class Case(NamedTuple):
    """ratio: of the trunk's work to the encoders', where all are trained."""

    ratio: int
    encoders: int
    state: State
    workers: int
    microbatches: int


def cases(workers: list[int], microbatches: list[int]) -> list[Case]:
    every = product((1, 3, 8), WIDTHS, get_args(State), workers, microbatches)
    return [Case(*each) for each in every]


def tree(case: Case) -> nx.DiGraph[int]:
    """The encoders' stages, one encoder after the other, then the trunk's."""
    stages: nx.DiGraph[int] = nx.DiGraph()
    workers, ends = case.workers, []
    whole = 1 / (1 + case.ratio) / workers  # of a stage of the encoders: F and B
    for width in WIDTHS[case.encoders]:
        start = len(stages)
        end = start + round(width * workers)
        for s in range(start, end):
            trained = case.state == "trained"
            trained |= case.state == "adapters" and s == end - 1
            stages.add_node(s, **_times(whole, 2 if trained else 0))
        nx.add_path(stages, range(start, end))
        ends.append(end - 1)
    start = len(stages)
    for s in range(start, start + workers):
        back = 1 if case.state == "adapters" else 2
        stages.add_node(s, **_times(case.ratio * whole, back))
    nx.add_path(stages, range(start, start + workers))
    stages.add_edges_from((end, start) for end in ends)
    return stages


def _times(whole: float, back: int) -> dict[str, float]:
    """whole: of F and B where a stage is trained; back: how many F its B takes."""
    f = whole / 3
    return {"forward": f, "backward": back * f, "held": f if back else 0.0}


def line(case: Case) -> nx.DiGraph[int]:
    """The same layers in a row, in as many stages as workers."""
    layers = [
        {name: x / LAYERS for name, x in data.items()}
        for _, data in tree(case).nodes(data=True)
        for _ in range(LAYERS)
    ]
    work = [each["forward"] + each["backward"] for each in layers]
    ends = [0, *even_cut(work, case.workers), len(layers)]
    stages: nx.DiGraph[int] = nx.path_graph(case.workers, nx.DiGraph)
    for s in range(case.workers):
        part = layers[ends[s] : ends[s + 1]]
        for name in ("forward", "backward", "held"):
            stages.nodes[s][name] = sum(each[name] for each in part)
    return stages


def even_cut(work: list[float], parts: int) -> list[int]:
    """Where to cut so that the largest part is least."""
    before = [0.0, *accumulate(work)]
    best: dict[tuple[int, int], tuple[float, list[int]]] = {(0, 0): (0.0, [])}
    for part, end in product(range(1, parts + 1), range(1, len(work) + 1)):
        options = []
        for i in range(end):
            if (part - 1, i) in best:
                most, cuts = best[part - 1, i]
                options.append((max(most, before[end] - before[i]), [*cuts, i]))
        if options:
            best[part, end] = min(options)
    return best[parts, len(work)][1][1:]


class Step(NamedTuple):
    """held: activations of the worker that holds most; encoders: the same without the
    trunk's; caps: in_flight of the encoders' stages."""

    seconds: float
    held: float
    encoders: float
    caps: tuple[int | None, ...]


def step(name: str, case: Case) -> Step:
    """A step by a schedule of the library."""
    stages = line(case) if name == "1f1b" else tree(case)
    return measured(schedules.LIBRARY[name](case.workers, case.microbatches), stages)


def measured(schedule: Schedule, stages: nx.DiGraph[int]) -> Step:
    found = fxsched.simulate(schedule, stages, None)
    workers = schedule.workers
    encoders = encoder_stages(stages, workers)
    jobs, data = found.timeline.jobs, stages.nodes
    sizes = [data[s]["held"] if s in encoders else 0.0 for s, _ in jobs.kinds]
    return Step(
        found.latency,
        max(peak.each.activations for peak in found.memory),
        max(peaks(found.timeline, schedule.release, sizes)),
        tuple(map(found.schedule.cap, sorted(encoders))),
    )


def searched(case: Case, effort: float) -> Step:
    """The best that search has for the tree and for the line; B whole, as of the
    others."""
    steps = []
    for stages in (tree(case), line(case)):
        best = fxsched.search(
            stages,
            case.workers,
            case.microbatches,
            split_backward=False,
            effort=effort,
            quiet=True,
        )
        steps.append(measured(best, stages))
    return min(steps)


def wrong(case: Case, steps: dict[str, Step]) -> list[str]:
    """What doesn't hold of a row."""
    said = []
    best = min(steps[name].seconds for name in NAMES)
    if steps["search"].seconds > best * (1 + 1e-6):
        said.append(f"search is behind: {steps['search'].seconds:.3f}, {best:.3f}")
    over = steps["nested"].seconds / steps["bubble_filled"].seconds - 1
    if over > ALLOWED:
        said.append(f"nested takes {over:.1%} longer than bubble_filled without caps")
    return [f"{case}: {line}" for line in said]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[4, 8], dest="workers_each")
    add("--microbatches", type=int, nargs="+", default=[8, 32], metavar="B")
    add("--effort", type=float, default=0.02, help="of each search (0.02)")
    parser.set_defaults(run=run, workers=0)


def run(options: argparse.Namespace) -> int:
    """1 if search is behind the library, or nested's caps cost more than ALLOWED or
    depend on the number of microbatches."""
    rows, faults = [], []
    caps: dict[tuple[object, ...], tuple[int | None, ...]] = {}
    for case in cases(options.workers_each, options.microbatches):
        steps = {name: step(name, case) for name in NAMES}
        steps["search"] = searched(case, options.effort)
        faults += wrong(case, steps)
        least = caps.setdefault(case[:-1], steps["nested"].caps)
        if steps["nested"].caps != least:
            faults.append(f"{case}: nested's caps depend on the microbatches")
        rows.append([*_words(case), *map(_cell, steps.values())])
    headers = ["trunk", "encoders", "", "W", "B", *NAMES, "search"]
    print("seconds of a step / activations held, those of encoders alone\n")
    print(tabulate(rows, headers, disable_numparse=True))
    print("\n".join(faults))
    return int(bool(faults))


def _words(case: Case) -> tuple[str, ...]:
    return f"{case.ratio}:1", *map(str, case[1:])


def _cell(step: Step) -> str:
    alone = f", {step.encoders:.2f}" if step.caps else ""
    return f"{step.seconds:.3f} / {step.held:.2f}{alone}"
