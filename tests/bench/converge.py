"""Held-out accuracy of the demo's task with stale weights, at rates that stay stable.

Each trains as `fxsched demo` does, at the rate that `fxsched stability --method
stale_sgd` leaves of the synchronous one; the last shows what becomes of one without.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from tabulate import tabulate

from fxsched import Schedule, schedules
from fxsched.cli.demo_task import LEARNING_RATE, Task, accuracy

UPDATES = 8  # in a call, as the demo has them


class Contestant(NamedTuple):
    """A schedule by the number of workers; rate: None for the stable one."""

    make: Callable[[int], Schedule]
    rate: float | None = None


CONTESTANTS = (
    Contestant(lambda w: schedules.one_f_one_b(w, 2 * w)),
    Contestant(lambda w: schedules.stale_by_one(w, UPDATES * w)),
    Contestant(lambda w: schedules.pipedream_2bw(w, UPDATES * 2 * w, 2 * w)),
    Contestant(lambda w: schedules.pipedream(w, UPDATES)),
    Contestant(lambda w: schedules.pipedream(w, UPDATES), LEARNING_RATE),
)


def train(contestant: Contestant, workers: int, steps: int, seed: int) -> Task:
    """A task, trained."""
    schedule = contestant.make(workers)
    task = Task(schedule, steps, learning_rate=contestant.rate, seed=seed)
    while task.done < task.calls:
        task.train(task.batches.draw())
    return task


def row(contestant: Contestant, options: argparse.Namespace) -> list[str]:
    """Of the table: the median of several seeds, and all."""
    shares = []
    for seed in range(options.seeds):
        task = train(contestant, options.pipeline, options.steps, seed)
        held_out = task.batches.judged["held-out"]
        shares.append(100 * accuracy(task.step, held_out, task.batches.rows))
        task.runner.close()
        torch._dynamo.reset()
    every = " ".join(f"{share:.1f}" for share in shares)
    rates = task.rates
    name = str(task.schedule.name)
    return [
        name,
        f"{rates.late}",
        f"{rates.learning_rate:.3g}",
        f"{median(shares):.1f} %",
        every,
    ]


def run(options: argparse.Namespace) -> int:
    """Prints the table."""
    rows = [row(contestant, options) for contestant in CONTESTANTS]
    headers = ["schedule", "updates late", "rate", "held out", "by seed"]
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))
    return 0
