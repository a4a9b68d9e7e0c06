"""fxsched.search against the schedules that the authors of Zero Bubble searched.

Bubble rates are of the longest span, m (F + B + W) being work, for the activation
memory of 1F1B (zb_1p) and twice that (zb_2p). Activations are held from F to the end of
W, and any number of stages a worker is allowed; "as theirs" has one stage a worker, and
B frees what the paper says that it frees.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

import fxsched

REFERENCE = Path(__file__).parents[1] / "reference" / "zero_bubble.json"
LENGTH = 1024  # tokens of a sequence, s
KEYS, ALLOWED = ("zb_1p", "zb_2p"), 0.01


def kept(row: dict[str, Any]) -> float:
    """What W needs of what F saves: 32 h of 34 h + 5 a s bytes a token."""
    small = row["workers"] == 8 and row["forward"] < 20_000
    width = 96 if small else 128  # h / a of the paper's models: 1.5 B, and larger ones
    return 32 * width / (34 * width + 5 * LENGTH)


def find(row: dict[str, Any], key: str, **more: Any) -> tuple[float, float, int, float]:
    """Bubble rate, the most activations of a worker, stages, and seconds it took."""
    p, m, transfer = row["workers"], row["microbatches"], row["transfer"]
    names = ("forward", "backward_input", "backward_weight")
    times = dict(zip("FBW", (row[name] for name in names), strict=True))
    began = time.perf_counter()
    limit = p * (1 if key == "zb_1p" else 2)
    schedule = fxsched.search(
        times, p, m, limit, transfer, objective="span", quiet=True, **more
    )
    seconds = time.perf_counter() - began
    stages = schedule.stages or p
    share = {d: x * p / stages for d, x in times.items()}
    found = fxsched.simulate(schedule, stages, share, transfer)
    work = m * sum(times.values())
    peak = max(w.peak_activations for w in found.workers) * p / stages
    return (found.span - work) / found.span, peak, stages, seconds


def run(options: argparse.Namespace) -> int:
    """1 if a row is more than 0.01 above the printed rate."""
    reference = json.loads(REFERENCE.read_text())
    chosen: Sequence[int] = options.rows or range(len(reference))
    table, missed = [], 0
    for i in chosen:
        row = reference[i]
        for key in KEYS:
            how = {"effort": options.effort, "seed": options.seed}
            rate, peak, stages, seconds = find(row, key, **how)
            same = {"stages": row["workers"], "kept": kept(row)}
            theirs = find(row, key, **how, **same)
            missed += rate > row[key] + ALLOWED
            table.append(
                (
                    *(f"{row['workers']}", f"{row['microbatches']}", key),
                    *(f"{row[key]:.4f}", f"{rate:.4f}", f"{peak:.4g}", f"{stages}"),
                    *(f"{seconds:.1f}", f"{theirs[0]:.4f}", f"{theirs[3]:.1f}"),
                )
            )
    headers = "workers|microbatches|schedule|printed|found|activations|stages|seconds"
    headers += "|as theirs|seconds"
    print(tabulate(table, headers.split("|"), disable_numparse=True))
    return int(missed > 0)
