"""Predicted against measured step time: what a plan says, and what a step takes.

--model: a GPT of the given size, or one of tests/encoders.py. --schedules may have
`recommended`, for what fxsched.recommend takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

import fxsched
from fxsched import schedules
from fxsched.models.gpt import GPT, GPTConfig

from ..encoders import MODELS, Asked
from .measure import WARM, clear, slowest
from .ours import recording

RECOMMENDED = "recommended"


def run(options: argparse.Namespace) -> int:
    """Every schedule's step: predicted from a profile of one microbatch, predicted from
    the durations of the jobs that ran, and measured, in turns.

    A second profile, halfway through the race, says how much faster or slower the
    machine has become; `paced` is how far off a prediction scaled by that is.
    """
    dist.init_process_group("gloo")
    model, batch = made(options)
    count = options.microbatches
    profile = fxsched.profile(model, *batch, microbatches=count)
    world, rows = dist.get_world_size(), []
    racers = []
    for name in options.schedules:
        if name == RECOMMENDED:
            schedule = _recommended(model, batch, profile)
        else:
            schedule = schedules.LIBRARY[name](workers=world, microbatches=count)
        # a step that keeps its timeline also waits for all ranks: time another
        for record in (True, False):
            model, batch = made(options)
            inside = None
            if options.optimizer:
                inside = torch.optim.AdamW(model.parameters(), lr=1e-4)
            given = fxsched.backend(schedule, profile=profile, optimizer=inside)
            backend = fxsched.Backend(recording(given.options, record))
            racers.append(Racer(name, model, backend, batch))
    half = options.steps // 2
    race(racers, half)
    model, batch = made(options)
    again = fxsched.profile(model, *batch, microbatches=count)
    pace = _total(again) / _total(profile)
    race(racers, options.steps - half)
    for recorded, timed in zip(racers[::2], racers[1::2], strict=True):
        measured = statistics.median(slowest(timed.seconds).tolist())
        ahead = recorded.plan.simulate(prefetch=1).latency
        after = statistics.median(recorded.simulated)
        seconds = ahead, pace * ahead, after
        off, paced, jobs_off = (each / measured - 1 for each in seconds)
        times = 1e3 * measured, 1e3 * ahead, off, paced, 1e3 * after, jobs_off
        rows.append((recorded.name, *times))
    if not dist.get_rank():
        headers = "schedule|measured ms|from a profile ms|off|paced"
        headers += "|from its jobs ms|off"
        formats = ("", ".1f", ".1f", "+.1%", "+.1%", ".1f", "+.1%")
        print(tabulate(rows, headers.split("|"), floatfmt=formats))
        print(f"Halfway, a profile takes {pace:.3f} of the first one's time.")
        if options.json is not None:
            names = ["schedule", "measured", "profile", "off", "paced"]
            names += ["jobs", "jobs_off"]
            found = [dict(zip(names, row, strict=True)) for row in rows]
            options.json.write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


def _total(profile: fxsched.Profile) -> float:
    """Seconds of F and B of all nodes."""
    return sum(map(sum, profile.measured.values()))


def made(options: argparse.Namespace) -> Asked:
    """The model with its inputs, the same each time and on each rank."""
    torch.manual_seed(0)
    if options.model in MODELS:
        return MODELS[options.model]()
    config = GPTConfig(
        vocabulary=options.vocabulary,
        length=options.length,
        width=options.width,
        layers=options.layers,
        dropout=0.0,
    )
    shape = (options.batch, options.length)
    words = (torch.randint(options.vocabulary, shape) for _ in range(2))
    return Asked(GPT(config), tuple(words))


def _recommended(
    model: torch.nn.Module, batch: tuple[torch.Tensor, ...], profile: fxsched.Profile
) -> fxsched.Schedule:
    """What rank 0 recommends for all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        text: list[str | None] = [None]
        file = Path(folder) / "schedule.json"
        if not dist.get_rank():
            world = dist.get_world_size()
            found = fxsched.recommend(model, world, *batch, profile=profile)
            print(found, flush=True)
            if found.schedule.workers == world:
                stages = len(found.plan.stages)  # a number that ddp leaves open
                replace(found.schedule, stages=stages).save(file)
                text = [file.read_text()]
        dist.broadcast_object_list(text)
        if text[0] is None:
            raise SystemExit("one process is recommended, which isn't raced here")
        file.write_text(text[0])
        return fxsched.load_schedule(file)


@dataclass
class Racer:
    """A compiled model, and the seconds of its steps, or what they should have been."""

    name: str
    model: torch.nn.Module
    backend: fxsched.Backend
    batch: tuple[torch.Tensor, ...]
    seconds: list[float] = field(default_factory=list)
    simulated: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.step: Any = torch.compile(self.model, backend=self.backend)

    @property
    def plan(self) -> fxsched.Plan:
        assert self.backend.plan is not None
        return self.backend.plan

    def note(self, seconds: float) -> None:
        """Notes what the last step took, and what its jobs say that it should."""
        self.seconds.append(seconds)
        if self.backend.options.record:
            events = self.backend.timeline
            self.simulated.append(self.plan.simulate(events, prefetch=1).latency)


def race(racers: list[Racer], rounds: int) -> None:
    """Steps in turn, after some to warm up. In each turn, a step goes before the one
    that counts: caches then hold what is this racer's, as in training and a profile."""
    for number in range(-WARM, rounds):
        for each in racers:
            for counts in (False, True):
                clear(each.model)
                dist.barrier()
                start = time.perf_counter()
                loss = each.step(*each.batch)
                if each.backend.options.optimizer is None:
                    loss.backward()
                if counts and number >= 0:
                    each.note(time.perf_counter() - start)
