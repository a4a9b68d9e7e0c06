"""fxsched against its peers in PyTorch: the same model, microbatches and processes.

Contestants take their steps in turn; a step lasts as long as on its slowest rank, the
optimizer is left out. Before it is timed, a contestant's gradients must be eager
PyTorch's. `alone` is all of the work in one process: with W ranks none can take less
than a W-th of it, the limit. A bound is the step of a schedule where transfers take no
time and each job as long as it did in a step that kept its timeline.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

import fxsched

from .language import Setup
from .measure import RARELY, Contestant, check, clear, measure
from .ours import ENTRIES, Entry, enter, fit
from .pipelining import best_cuts, peer
from .rivals import PIPELINES, RIVALS

NAMES = (*RIVALS, *PIPELINES, *(entry.name for entry in ENTRIES))


@dataclass
class Runner:
    """A contestant, and, if it is fxsched's, what its timelines say.

    bounds: steps that wait for nothing but jobs, each with one timeline's durations,
        in the planned order.
    """

    contestant: Contestant
    entry: Entry | None = None
    backend: fxsched.Backend | None = None
    recorded: Contestant | None = None
    bounds: list[fxsched.Simulation] = field(default_factory=list)


class Race:
    """The contestants that were asked for, with the rivals that they need."""

    def __init__(self, options: argparse.Namespace, setup: Setup) -> None:
        self.options, self.setup = options, setup
        self.cuts: dict[str, tuple[int, ...]] = {}  # of rivals with stages
        wanted = chosen(options.only)
        self.runners: dict[str, Runner] = {}
        for name in wanted:
            if name in RIVALS:
                self.runners[name] = Runner(RIVALS[name](setup))
            elif name in PIPELINES:
                self.runners[name] = Runner(self.pipeline(name))
        for entry in ENTRIES:
            if entry.name in wanted:
                self.runners[entry.name] = self.ours(entry)

    @cached_property
    def profile(self) -> fxsched.Profile:
        model, count = self.setup.model(), self.setup.microbatches
        return fxsched.profile(model, *self.setup.inputs, microbatches=count)

    def pipeline(self, name: str) -> Contestant:
        """A peer on the split at block boundaries that is best for it."""
        setup, kind, tries = self.setup, PIPELINES[name], self.options.tries
        cuts = best_cuts(kind, setup.line, setup.microbatches, tries, setup.compiled)
        self.cuts[name] = cuts
        contestant, _ = peer(
            kind, setup.line(), setup.microbatches, cuts, setup.compiled
        )
        contestant.name = name
        return contestant

    def ours(self, entry: Entry) -> Runner:
        stages: str | list[str] = "auto"
        if entry.split == "rival":
            parts = self.setup.line().parts
            stages = [parts[cut].name for cut in self.cuts[entry.rivals[0]]]
        elif entry.split == "blocks":
            stages = [f"blocks.{i}" for i in range(1, self.setup.config.layers)]
        profile = None
        if entry.split == "profile":
            profile = fit(entry, self.setup, self.profile)
        contestant, backend = enter(entry, self.setup, stages, profile)
        twin, recorder = enter(entry, self.setup, stages, profile, record=True)
        runner = Runner(contestant, entry, backend, twin)
        step = twin.step

        def recorded() -> None:
            step()
            plan = recorder.plan
            assert plan is not None
            taken = {event.job: event.end - event.start for event in recorder.timeline}
            runner.bounds.append(plan.simulate(taken.__getitem__, transfer=0.0))

        # a step that keeps its timeline also waits for all ranks: another is timed
        twin.step, twin.every = recorded, RARELY
        return runner

    def run(self) -> list[Row]:
        wanted = self.setup.gradients()
        for runner in self.runners.values():
            begin = time.perf_counter()
            check(runner.contestant, wanted)
            clear(runner.contestant.model)
            plan = None if runner.backend is None else runner.backend.plan
            if plan is not None and not plan.parts:
                stages = plan.stages.nodes(data="modules")
                runner.contestant.split = " | ".join(", ".join(m) for _, m in stages)
            if not dist.get_rank():
                first = time.perf_counter() - begin
                print(f"{runner.contestant.name}: first step {first:.1f} s", flush=True)
        self.runners["alone"].contestant.every = self.options.alone_every
        racers = [runner.contestant for runner in self.runners.values()]
        twins = [r.recorded for r in self.runners.values() if r.recorded is not None]
        taken = measure([*racers, *twins], self.options.steps)
        seconds = {n: taken[id(r.contestant)] for n, r in self.runners.items()}
        return [row(name, self.runners, seconds) for name in self.runners]


@dataclass(frozen=True)
class Row:
    """One contestant's result; seconds are of a step on the slowest rank.

    to_rival: of its fastest rival, as to_alone the median over rounds.
    limit: to_alone times the ranks.
    bound: of its schedule, in seconds; bubble: the share of it that workers wait.
    once: whether each weight is kept by one rank alone.
    """

    name: str
    median: float
    fastest: float
    to_alone: float
    limit: float
    rival: str | None
    to_rival: float | None
    bound: float | None
    bubble: float | None
    once: bool | None
    error: float
    split: str
    seconds: list[float]

    @property
    def above_bound(self) -> float | None:
        return None if self.bound is None else self.median / self.bound - 1


def row(name: str, runners: dict[str, Runner], seconds: dict[str, list[float]]) -> Row:
    runner = runners[name]

    def ratio(to: str) -> float:
        every, other = runner.contestant.every, runners[to].contestant.every
        pairs = zip(seconds[name][::other], seconds[to][::every], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    rivals = runner.entry.rivals if runner.entry is not None else ()
    rival = min(rivals, key=lambda n: statistics.median(seconds[n]), default=None)
    once = None
    if runner.backend is not None and runner.backend.plan is not None:
        once = all(len(group.owners) == 1 for group in runner.backend.plan.groups)
    bounds = sorted(runner.bounds, key=lambda found: found.latency)
    bound = bounds[len(bounds) // 2] if bounds else None
    return Row(
        name,
        statistics.median(seconds[name]),
        min(seconds[name]),
        ratio("alone"),
        ratio("alone") * dist.get_world_size(),
        rival,
        None if rival is None else ratio(rival),
        None if bound is None else bound.latency,
        None if bound is None else bound.bubble_rate,
        once,
        runner.contestant.error,
        runner.contestant.split,
        seconds[name],
    )


def chosen(patterns: Sequence[str]) -> list[str]:
    """Names that match, the rivals that they are held against, and `alone`."""
    found = {n for p in patterns for n in fnmatch.filter(NAMES, p)}
    for entry in ENTRIES:
        if entry.name in found:
            found |= {*entry.rivals}
    return [name for name in NAMES if name in found | {"alone"}]


def run(options: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = Race(options, Setup.of(options)).run()
    if not dist.get_rank():
        print(table(rows))
        for each in rows:
            if each.split:
                print(f"{each.name}: {each.split}")
        print(fastest(rows))
        if options.json is not None:
            known = {k: v for k, v in vars(options).items() if k not in ("json", "run")}
            result: dict[str, Any] = {"options": known}
            result["rows"] = [vars(each) for each in rows]
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


def fastest(rows: Sequence[Row]) -> str:
    once = [each for each in rows if each.once]
    if not once:
        return ""
    best = min(once, key=lambda each: each.median)
    return f"fastest with each weight kept once: {best.name}, {best.to_alone:.3f} alone"


def table(rows: Sequence[Row]) -> str:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return tabulate(
        [
            (
                each.name,
                f"{1000 * each.median:.0f}",
                f"{1000 * each.fastest:.0f}",
                f"{each.to_alone:.3f}",
                f"{each.limit:.3f}",
                number(each.to_rival, ".3f"),
                each.rival or "",
                number(each.bound and 1000 * each.bound, ".0f"),
                number(each.bubble, ".1%"),
                number(each.above_bound, "+.1%"),
                f"{each.error:.0e}",
            )
            for each in rows
        ],
        [
            "contestant",
            "ms",
            "fastest",
            "/ alone",
            "/ limit",
            "/ rival",
            "rival",
            "bound ms",
            "bubble",
            "above it",
            "error",
        ],
        colalign=("left", *("right",) * 5, "left", *("right",) * 4),
        disable_numparse=True,
    )
