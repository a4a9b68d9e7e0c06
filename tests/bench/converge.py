"""Held-out accuracy of the demo's task with stale weights, at rates that stay stable.

Each trains as `fxsched demo` does, at the rate that `fxsched stability --method
stale_sgd` leaves of the synchronous one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
from tabulate import tabulate

from fxsched import Schedule, schedules
from fxsched.cli.demo_task import Task, accuracy

UPDATES = 8  # in a call, as the demo has them


Make = Callable[[int], Schedule]  # by the number of workers

CONTESTANTS: tuple[Make, ...] = (
    lambda w: schedules.one_f_one_b(w, 2 * w),
    lambda w: schedules.stale_by_one(w, UPDATES * w),
    lambda w: schedules.pipedream_2bw(w, UPDATES * 2 * w, 2 * w),
    lambda w: schedules.pipedream(w, UPDATES),
)


def train(schedule: Schedule, steps: int, seed: int) -> Task:
    """A task, trained."""
    task = Task(schedule, steps, seed=seed)
    while task.done < task.calls:
        task.train(task.batches.draw())
    return task


def row(make: Make, options: argparse.Namespace) -> list[str]:
    """Of the table: the median of several seeds, and all."""
    shares = []
    for seed in range(options.seeds):
        task = train(make(options.pipeline), options.steps, seed)
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
    rows = [row(make, options) for make in CONTESTANTS]
    headers = ["schedule", "updates late", "rate", "held out", "by seed"]
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))
    return 0
