"""Chooses what `python -m tests` leaves out, so that it takes 15 minutes on 2 cores.

    python -m tests --all -v --durations=0 | tee log
    python -m tests.left_out log

writes left_out.txt anew. Every test function keeps its fastest case if that takes less
than MOST seconds; so do all that begin with one of KEPT. Of the other cases the fastest
are kept, until they take MORE seconds together.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

MOST, MORE = 5, 150
# what a change of the runtime breaks first, the proof, and the commands of pages
KEPT = (
    "tests/transport/test_torchrun.py::test_ranks_equal_eager[2]",
    "tests/placement/test_whole_batch.py::test_two_ranks",
    "tests/checker/test_mutants.py",
    "tests/package/test_bench_commands.py",
)
FILE = Path(__file__).with_name("left_out.txt")


def seconds_of_tests(log: str) -> dict[str, float]:
    """Of each test's setup, call and teardown, as --durations=0 -v prints them."""
    seconds: dict[str, float] = defaultdict(float)
    for line in re.finditer(r"^([\d.]+)s (?:call|setup|teardown) +(\S.*)$", log, re.M):
        seconds[line[2].strip()] += float(line[1])
    return seconds


def all_tests(log: str) -> list[str]:
    return re.findall(r"^(?:\[gw\d+\] .*(?:PASSED|FAILED) )(tests/.*\S)", log, re.M)


def left_out(log: str) -> list[str]:
    """The tests' ids, in order."""
    seconds = seconds_of_tests(log)
    by_cost = sorted({*all_tests(log), *seconds}, key=lambda each: seconds.get(each, 0))
    fastest: dict[str, str] = {}
    for each in by_cost:
        fastest.setdefault(each.partition("[")[0], each)
    first = {each for each in fastest.values() if seconds.get(each, 0) < MOST}
    first |= {each for each in by_cost if each.startswith(KEPT)}
    kept, spent = set(first), 0.0
    for each in by_cost:
        if each not in first and spent < MORE:
            spent += seconds.get(each, 0)
            kept.add(each)
    return sorted({*by_cost} - kept)


if __name__ == "__main__":
    FILE.write_text("\n".join(left_out(Path(sys.argv[1]).read_text())) + "\n")
