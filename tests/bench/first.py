"""The first call of a model, and its backward, against torch.compile without fxsched.

Each contestant runs in fresh processes, in turn with the others; imports don't count.
"again" is "lpp" at its second start, which finds the plan of the first on disk.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tabulate import tabulate
from torch._dynamo.backends.registry import lookup_backend

import fxsched
from fxsched import pipeline, schedules
from fxsched.models.gpt import GPT, GPTConfig

PLAIN = {"eager": "aot_eager", "inductor": "inductor"}  # by the stages' compiler
SCHEDULES = {  # of fxsched's contestants
    "auto": lambda: schedules.one_f_one_b(2, 8),
    "names": lambda: schedules.one_f_one_b(2, 8),
    "one worker": lambda: schedules.one_f_one_b(1, 8),
    "lpp": lambda: schedules.lpp(4, 2, 8),
    "again": lambda: schedules.lpp(4, 2, 8),
}
KEPT = ("lpp", "again")  # share the plans on disk
# What each part of fxsched is: functions by module, where they are looked up.
PARTS = {
    "trace": ("planning.trace_microbatch",),
    "rows": ("placement.tracker.Tracker.see", "placement.tracker.Tracker.settle"),
    "AOTAutograd": ("passes.differentiate.trace_stage",),
    "check": ("plans.plan.Plan.check",),
    "Inductor": ("autodiff.inductor.compile_stages",),
    "codegen": ("planning.Runnable",),
    "step": ("backend.call_step",),
    "disk": tuple(
        f"plan_cache.find.{name}"
        for name in ("plan_key", "kept_plan", "packed", "keep")
    ),
    "rest": ("backend.make_step",),
    "passes": ("pipeline.cut_program", "pipeline.free_values"),
}
# The passes that count as a part of their own.
PASSES = {
    "assign_stages": "stages",
    "copy_shared": "stages",
    "split_stages": "stages",
    "differentiate_stages": "differentiate",
}
COLUMNS = (
    *("Dynamo", "trace", "rows", "stages", "AOTAutograd", "differentiate", "passes"),
    *("check", "Inductor", "codegen", "disk", "rest", "step"),
)


def run(options: argparse.Namespace) -> int:
    if options.one:
        print(json.dumps(_measure(options.one, options)))
        return 0
    plain = PLAIN[options.compiler]
    names = [plain, *(options.only or SCHEDULES)]
    calls: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as kept:
            for name in names:
                plans = kept if name in KEPT else ""
                calls[name].append(_fresh(name, options, plans))
    medians = {
        name: {key: statistics.median(call[key] for call in found) for key in found[0]}
        for name, found in calls.items()
    }
    base = medians[plain]["first"]
    rows = [
        (name, m["first"], m["first"] / base, _planning(m), m["later"])
        for name, m in medians.items()
    ]
    head = ("", "first call", f"/ {plain}'s", "planning", "later call")
    print(f"{options.blocks} blocks; seconds, medians of {options.rounds} processes\n")
    print(tabulate(rows, head, floatfmt=".2f"))
    print("\nwhere the first call's time goes; Dynamo's is all that is left\n")
    parts = [(name, *(medians[name][part] for part in COLUMNS)) for name in names[1:]]
    print(tabulate(parts, ("", *COLUMNS), floatfmt=".2f"))
    if calls.keys() >= {*KEPT}:
        first, again = (_planning(medians[name]) for name in KEPT)
        print(f"\nplanning of again / of lpp: {again / first:.3f}")
    if options.json:
        options.json.write_text(json.dumps(calls, indent=1))
    return 0


def _planning(call: dict[str, float]) -> float:
    """Seconds from Dynamo's graph to programs that are ready to run."""
    return sum(call[part] for part in COLUMNS if part not in ("Dynamo", "step"))


def _fresh(name: str, options: argparse.Namespace, plans: str) -> dict[str, float]:
    """What one contestant takes in a process of its own; plans: on disk."""
    command = [sys.executable, "-m", "tests.bench", "first", "--one", name]
    for option in ("blocks", "width", "length", "vocabulary", "batch", "compiler"):
        command += [f"--{option}", str(getattr(options, option))]
    environment = {**os.environ, "FXSCHED_CACHE": plans}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, text=True, env=environment
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # fxsched's workers share them
    torch.manual_seed(0)
    sizes = GPTConfig(
        options.vocabulary, options.length, options.width, layers=options.blocks
    )
    model = GPT(sizes)
    tokens, targets = torch.randint(
        options.vocabulary, (2, options.batch, options.length)
    )
    watch = Stopwatch()
    backend: Any = _backend(name, options)
    step: Any = torch.compile(model, backend=backend)

    def call() -> float:
        model.zero_grad()
        start = time.perf_counter()
        step(tokens, targets).backward()
        return time.perf_counter() - start

    with _watching(watch):
        first = call()
    parts = {part: watch.seconds.get(part, 0.0) for part in COLUMNS}
    parts["Dynamo"] = first - sum(parts.values())
    return {"first": first, "later": min(call(), call()), **parts}


def _backend(name: str, options: argparse.Namespace) -> Any:
    lookup_backend(PLAIN[options.compiler])  # imports it
    if name not in SCHEDULES:
        return name
    named = [f"blocks.{options.blocks // 2}"]
    return fxsched.backend(
        SCHEDULES[name](),
        stages=named if name == "names" else "auto",
        transport="threads",
        stage_compiler=options.compiler,
    )


class Stopwatch:
    """Seconds of each part, without those of the parts that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.inner: list[float] = [0.0]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.perf_counter() - start
                own = whole - self.inner.pop()
                self.inner[-1] += whole
                self.seconds[part] = self.seconds.get(part, 0.0) + own

        return run


@contextmanager
def _watching(watch: Stopwatch) -> Iterator[None]:
    """Times the parts of fxsched while it is open."""
    before: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    for part, paths in PARTS.items():
        for path in paths:
            owner, name = find(path)
            put(owner, name, watch.timed(part, getattr(owner, name)))
    for name in ("GRAPH_PASSES", "STEP_PASSES"):
        passes = [
            watch.timed(PASSES.get(each.__name__, "passes"), each)
            for each in getattr(pipeline, name)
        ]
        put(pipeline, name, tuple(passes))
    yield
    for owner, name, value in reversed(before):
        setattr(owner, name, value)


def find(path: str) -> tuple[Any, str]:
    """The module or class of fxsched that a dotted path ends in, and the last name."""
    *parts, name = path.split(".")
    inside = [part for part in parts if part[0].isupper()]
    modules = parts[: len(parts) - len(inside)]
    owner: Any = importlib.import_module(".".join(["fxsched", *modules]))
    for part in inside:
        owner = getattr(owner, part)
    return owner, name
