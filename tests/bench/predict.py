"""Predicted against measured step time: what a plan says, and what a step takes."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

import fxsched
from fxsched import schedules
from fxsched.models.gpt import GPT, GPTConfig

from .measure import WARM, clear, slowest
from .ours import recording


def run(options: argparse.Namespace) -> int:
    """Every schedule's step: predicted from a profile of one microbatch, predicted from
    the durations of the jobs that ran, and measured, in turns."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = GPTConfig(
        vocabulary=options.vocabulary,
        length=options.length,
        width=options.width,
        layers=options.layers,
        dropout=0.0,
    )
    shape = (options.batch, options.length)
    tokens = torch.randint(options.vocabulary, shape)
    target = torch.randint(options.vocabulary, shape)
    count = options.microbatches
    profile = fxsched.profile(GPT(config), tokens, target, microbatches=count)
    world, rows = dist.get_world_size(), []
    racers = []
    for name in options.schedules:
        schedule = schedules.LIBRARY[name](workers=world, microbatches=count)
        # a step that keeps its timeline also waits for all ranks: time another
        for record in (True, False):
            torch.manual_seed(0)
            model = GPT(config)
            inside = None
            if options.optimizer:
                inside = torch.optim.AdamW(model.parameters(), lr=1e-4)
            made = fxsched.backend(schedule, profile=profile, optimizer=inside)
            backend = fxsched.Backend(recording(made.options, record))
            racers.append(Racer(name, model, backend, (tokens, target)))
    race(racers, options.steps)
    for recorded, timed in zip(racers[::2], racers[1::2], strict=True):
        measured = statistics.median(slowest(timed.seconds).tolist())
        ahead = recorded.plan.simulate(prefetch=1).latency
        after = statistics.median(recorded.simulated)
        rows.append((recorded.name, 1e3 * measured, 1e3 * ahead, ahead / measured - 1))
        rows[-1] += (1e3 * after, after / measured - 1)
    if not dist.get_rank():
        headers = "schedule|measured ms|from a profile ms|off|from its jobs ms|off"
        formats = ("", ".1f", ".1f", "+.1%", ".1f", "+.1%")
        print(tabulate(rows, headers.split("|"), floatfmt=formats))
        if options.json is not None:
            names = ("schedule", "measured", "profile", "off", "jobs", "jobs_off")
            found = [dict(zip(names, row, strict=True)) for row in rows]
            options.json.write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


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


def race(racers: list[Racer], rounds: int) -> None:
    """Steps in turn, after some to warm up."""
    for number in range(-WARM, rounds):
        for each in racers:
            clear(each.model)
            dist.barrier()
            start = time.perf_counter()
            loss = each.step(*each.batch)
            if each.backend.options.optimizer is None:
                loss.backward()
            if number < 0:
                continue
            each.seconds.append(time.perf_counter() - start)
            if each.backend.options.record:
                events = each.backend.timeline
                each.simulated.append(each.plan.simulate(events, prefetch=1).latency)
