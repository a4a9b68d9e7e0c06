"""How long planning takes, and how much memory: one rank's program, and all ranks'.

Each line of the table is a process of its own, on a model of small equal stages.
"trace" and "stages" are what a model's size decides: Dynamo, and the graphs of stages.
What the number of jobs decides comes after: their order, the lines of the step (what is
done besides, and all messages), the fx programs, and the check. For "one", that is the
program of the worker in the middle, checked by itself; for "all", those of all workers,
checked together.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

import fxsched
from fxsched import Schedule, pipeline, schedules
from fxsched.checker.check_messages import check_summaries

from .overhead import Stages

WIDTH = 8
SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "1f1b": lambda w, s, b: schedules.one_f_one_b(w, b),
    "gpipe": lambda w, s, b: schedules.gpipe(w, b),
    "interleaved": lambda w, s, b: schedules.interleaved(w, b, s),
    "zb_h1": lambda w, s, b: schedules.zb_h1(w, b),
    "ddp": lambda w, s, b: schedules.ddp(w, b),
    "fsdp": lambda w, s, b: schedules.fsdp(w, b),
    "fslpp": lambda w, s, b: schedules.fslpp(w, max(1, w // 8), b, s),
}
LINES = ("unroll_jobs", "collect_results", "lower_sums", "route_values")


class Case(NamedTuple):
    schedule: str
    workers: int
    stages: int
    microbatches: int
    programs: str  # "one" or "all"


class Taken(NamedTuple):
    """Seconds of each part, fx nodes of the programs, and the peak of RSS in MiB."""

    jobs: int
    nodes: int
    trace: float
    stages: float
    order: float
    lines: float
    programs: float
    check: float
    memory: float

    @property
    def planning(self) -> float:
        return self.order + self.lines + self.programs + self.check


def measure(case: Case) -> Taken:
    """Plans, writes and checks programs; in a fresh process, for the peak of memory."""
    torch.set_num_threads(1)
    seconds: dict[str, float] = {}

    def timed(each: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            made = each(*args)
            seconds[each.__name__] = time.perf_counter() - start
            return made

        return run

    for name in ("GRAPH_PASSES", "STEP_PASSES"):
        setattr(pipeline, name, tuple(map(timed, getattr(pipeline, name))))
    _, workers, stages, microbatches, programs = case
    schedule = SCHEDULES[case.schedule](workers, stages, microbatches)
    stages = schedule.stages or stages
    model, batch = Stages(WIDTH, stages), torch.ones(microbatches, WIDTH)
    names = [f"stages.{s}" for s in range(1, stages)]
    start = time.perf_counter()
    plan = fxsched.plan(model, schedule, batch, stages=names)
    made = time.perf_counter()
    here = range(workers) if programs == "all" else [workers // 2]
    nodes = sum(len(plan.programs[rank].graph.nodes) for rank in here)
    written = time.perf_counter()
    found = [plan.examine(rank) for rank in here]
    assert not any(summary.fault or summary.circle for summary in found)
    if programs == "all":
        check_summaries(found, plan.reference)
    checked = time.perf_counter()
    order, lines = seconds["order_jobs"], sum(seconds[name] for name in LINES)
    front = sum(seconds.values()) - order - lines
    trace = made - start - sum(seconds.values())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    parts = (trace, front, order, lines, written - made, checked - written)
    return Taken(len(plan.jobs), nodes, *parts, memory)


def run(options: argparse.Namespace) -> int:
    stages = options.stages or options.planned
    cases = [
        Case(schedule, options.planned, stages, microbatches, programs)
        for schedule in options.schedules
        for microbatches in options.microbatches
        for programs in options.programs
    ]
    rows = []
    for case in cases:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            taken = fresh.submit(measure, case).result()
        rows.append((case.schedule, case.microbatches, case.programs, *taken[:8]))
        rows[-1] += (taken.planning, f"{taken.memory:.0f}")
        print(case, f"{taken.planning:.2f} s, {taken.memory:.0f} MiB", flush=True)
    headers = "schedule|microbatches|programs|jobs|fx nodes|trace|stages|order|lines"
    headers += "|programs|check|order to check|peak MiB"
    print(f"\n{options.planned} workers, {stages} stages; seconds\n")
    print(tabulate(rows, headers.split("|"), floatfmt=".2f"))
    return 0
