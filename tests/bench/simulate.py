"""How fast the simulator is, against one that looks at every open job each time.

That is how parallelsim.py of a-rahimi/parallel-training works: of all microbatches'
next jobs, take the one that can start earliest. --parallelsim F runs that file itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
from tabulate import tabulate

import fxsched
from fxsched import Link, Network, Rate, schedules

TRIES = 3
LONG = 20.0  # seconds; the next size is not tried


def scan(stages: int, microbatches: int) -> float:
    """1F1B's placement without a cap: the latency, by scanning all open jobs."""
    free = [0] * stages
    ready = [0] * microbatches  # when the last job of each microbatch ended
    done = [0] * microbatches  # jobs of each microbatch that have run
    for _ in range(2 * stages * microbatches):
        best: tuple[int, int, int] | None = None
        for b, count in enumerate(done):
            if count < 2 * stages:
                worker = min(count, 2 * stages - 1 - count)
                start = max(free[worker], ready[b])
                if best is None or (start, b) < best[:2]:
                    best = (start, b, worker)
        assert best is not None
        start, b, worker = best
        ready[b] = free[worker] = start + (1 if done[b] < stages else 2)
        done[b] += 1
    return max(ready)


def parallelsim(path: Path) -> Callable[[int, int], float]:
    """The simulator of a parallelsim.py, for the same placement."""
    spec = importlib.util.spec_from_file_location("parallelsim", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(stages: int, microbatches: int) -> float:
        def place(work: Any) -> Any:
            return module.ComputeAndWeightWorkers(work.stage, work.stage)

        order = module.OldestBatchFirst(stages, microbatches)
        found = module.simulate(stages, stages, microbatches, place, order)
        return float(found.max_time())

    return run


def run(options: argparse.Namespace) -> int:
    stages = options.stages
    peer = parallelsim(options.parallelsim) if options.parallelsim else scan
    rows, slow = [], False
    for microbatches in options.microbatches:
        jobs = 2 * stages * microbatches
        seconds = []
        for _ in range(TRIES):
            start = time.perf_counter()
            found = fxsched.simulate(schedules.one_f_one_b(stages, microbatches))
            seconds.append(time.perf_counter() - start)
        taken = statistics.median(seconds)
        theirs = float("nan")
        if not slow:
            start = time.perf_counter()
            latency = peer(stages, microbatches)
            theirs = time.perf_counter() - start
            assert latency == found.latency, (latency, found.latency)
            slow = theirs * 4 > LONG
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        rows.append((microbatches, jobs, taken, jobs / taken, jobs / theirs, memory))
        print(f"{microbatches} microbatches done", flush=True)
    headers = "microbatches|jobs|seconds|jobs a second|scanning: jobs a second|GiB"
    formats = (",", ",", ".2f", ",.0f", ",.0f", ".2f")
    print(
        f"\n{stages} stages on as many workers, 1F1B; medians of {TRIES}; "
        "memory is the peak\n"
    )
    print(tabulate(rows, headers.split("|"), intfmt=",", floatfmt=formats))
    messages(stages, options.microbatches)
    if options.large:
        large()
    return 0


def messages(stages: int, sizes: list[int]) -> None:
    """Jobs a second if messages take no time, on a Link, and between hosts of 8."""
    hosts = [range(stages)[first : first + 8] for first in range(0, stages, 8)]
    chain = nx.path_graph(stages, nx.DiGraph)
    nx.set_edge_attributes(chain, 1e6, "bytes")
    inside, between = Rate(1e10, 1e-5, 1e-5), Rate(1e9, 5e-5, 2e-5)
    transfers = 0.0, Link(1e9, 5e-5), Network(hosts, inside, between)
    rows = []
    for microbatches in sizes:
        schedule = schedules.one_f_one_b(stages, microbatches)
        fastest = [float("inf")] * len(transfers)
        for _ in range(TRIES):
            for i, transfer in enumerate(transfers):
                start = time.process_time()
                fxsched.simulate(schedule, chain, {"F": 1e-3, "B": 2e-3}, transfer)
                fastest[i] = min(fastest[i], time.process_time() - start)
        jobs = 2 * stages * microbatches
        rows.append((microbatches, jobs, *(jobs / seconds for seconds in fastest)))
    headers = ["microbatches", "jobs", "no messages", "Link", "Network"]
    print(f"\nJobs a second of CPU time, the best of {TRIES}, by what messages take\n")
    print(tabulate(rows, headers, intfmt=",", floatfmt=",.0f"))


def large() -> None:
    """4096 workers in looped pipelines of 128, 2 million jobs."""
    start = time.perf_counter()
    found = fxsched.simulate(schedules.lpp(4096, 128, 8192, stages=128))
    taken = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"\n4096 workers, 128 stages, 8192 microbatches: {len(found.timeline):,} jobs "
        f"in {taken:.1f} s, {memory:.2f} GiB at the peak"
    )
