"""The idle share of pipelines with many updates in a call, on paper.

1f1b drains before each update; the others pay for filling and draining once a call.
F takes 1, B 2, an update nothing; a call has W microbatches for each update.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from tabulate import tabulate

import fxsched
from fxsched import Schedule, schedules

UPDATES = (1, 2, 4, 8, 16, 32, 64)


def drained(workers: int, microbatches: int) -> Schedule:
    """1f1b with a synchronous update after every W microbatches."""
    return replace(
        schedules.one_f_one_b(workers, microbatches), update_every=workers, name="1f1b"
    )


CONTESTANTS = (
    drained,
    schedules.stale_by_one,
    schedules.pipedream_2bw,
    schedules.pipedream,
)


def table(workers: int) -> str:
    """A row for each number of updates in a call."""
    rows = []
    for updates in UPDATES:
        made = [make(workers, updates * workers) for make in CONTESTANTS]
        idle = [100 * fxsched.simulate(each).bubble_rate for each in made]
        rows.append([updates, *(f"{share:.1f} %" for share in idle)])
    names = [each.name for each in made]
    return tabulate(rows, [f"updates, W = {workers}", *names], stralign="right")


def run(options: argparse.Namespace) -> int:
    """Prints a table for each number of workers."""
    print("\n\n".join(map(table, options.workers_each)))
    return 0
