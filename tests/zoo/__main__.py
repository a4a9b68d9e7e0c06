"""The zoo: python -m tests.zoo [--only NAME ...] [--fast] [--shards P].

At least 150 real models and features, each trained for a step by a schedule and in
plain PyTorch over the same microbatches. A row is "equal" (with its largest
difference), a "refusal" (a PlanError, with its message) or "other": wrong numbers, any
other exception, or a hang. Ends with 1 if there is any other.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import time
from collections import Counter

from tabulate import tabulate

from .compare import Asked, Row

ORDER = ("equal", "refusal", "skipped", "other")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", nargs="+", help="names of rows, * stands for any")
    parser.add_argument("--group", nargs="+", help="names of groups, such as vision")
    parser.add_argument("--fast", action="store_true", help="a few of each kind")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--schedule", help="one schedule for all rows")
    parser.add_argument("--shards", type=int, default=1, help="of each stage")
    parser.add_argument("--limit", type=float, default=240, help="seconds a row")
    parser.add_argument("--list", action="store_true", help="names of all rows")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[str]:
    from . import cases

    names = list(cases.FAST if options.fast else cases.all_cases())
    if options.group:
        groups = [zoo for zoo in cases.GROUPS if zoo.group in options.group]
        names = [case.name for zoo in groups for case in zoo]
    if options.only:
        names = [n for n in names if any(fnmatch.fnmatch(n, p) for p in options.only)]
    return names


def show(rows: list[Row]) -> str:
    table = [
        (r.name, r.schedule, r.kind, f"{r.seconds:.1f}", r.detail)
        for r in sorted(rows, key=lambda r: ORDER.index(r.kind))
    ]
    headers = ["row", "schedule", "", "s", "largest difference, or why"]
    widths = [None, None, None, None, 88]
    return tabulate(table, headers, maxcolwidths=widths, disable_numparse=True)


def main() -> int:
    """Runs the rows and prints the table; 1 if any is neither equal nor refused."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from .pool import run_all

    options = arguments()
    names = chosen(options)
    if options.list:
        print("\n".join(names))
        return 0
    start, rows = time.perf_counter(), []
    asked = Asked(options.schedule, options.shards)
    for row in run_all(names, asked, options.jobs, options.limit):
        rows.append(row)
        line = f"{len(rows)}/{len(names)} {row.name}: {row.kind}, {row.detail}"
        print(line, file=sys.stderr, flush=True)
    rows.sort(key=lambda row: names.index(row.name))
    print(show(rows))
    kinds = Counter(row.kind for row in rows)
    totals = ", ".join(f"{kinds[kind]} {kind}" for kind in ORDER)
    print(f"\n{len(rows)} rows: {totals}; {time.perf_counter() - start:.0f} s")
    return int(kinds["other"] > 0)


if __name__ == "__main__":
    sys.exit(main())
