"""Trainings under schedules with updates of their own, saved and resumed.

python -m tests.resumes [--ranks]: under each schedule, what is resumed has the bits of
what went on; --ranks: over two processes. What resumes builds its model in deferred().
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fxsched
from fxsched import Schedule, schedules
from fxsched.transport.world import from_rank_0, started_by_torchrun
from tests.ranks_save import Training
from tests.torchrun import again_on_ranks

STEPS = 2  # before the save, and after it

# whether the program steps the optimizer, or the loop
CASES: dict[str, tuple[Callable[[], Schedule], bool]] = {
    "ddp": (lambda: schedules.ddp(2, 2), False),
    "parameter_server": (lambda: schedules.parameter_server(2, 4), False),
    "zero1": (lambda: schedules.zero1(2, 2), False),
    "zero1 with optimizer=": (lambda: schedules.zero1(2, 2), True),
    "zero2 with optimizer=": (lambda: schedules.zero2(2, 2), True),
    "fsdp with optimizer=": (lambda: schedules.fsdp(2, 2), True),
    "local_sgd": (lambda: schedules.local_sgd(2, 2, 4), True),
    "local_sgd with outer=": (
        lambda: schedules.local_sgd(2, 2, 4, outer=(0.7, 0.9)),
        True,
    ),
    "pipedream": (lambda: schedules.pipedream(2, 4), True),
    "pipedream_2bw": (lambda: schedules.pipedream_2bw(2, 4), True),
    "stale_by_one": (lambda: schedules.stale_by_one(2, 4), True),
    "pipemare": (lambda: schedules.pipemare(2, 4), True),
}


def resume(folder: Path, case: str) -> tuple[Any, Any]:
    """Losses and a checksum of the state: of what went on, and of what was resumed."""
    make, steps_itself = CASES[case]
    results = []
    for seed in (0, 7):
        building = fxsched.deferred(draws=False) if seed else None
        training = Training.of(make(), seed, steps_itself, building)
        if seed == 0:
            training.steps(STEPS)
            training.save(folder)
        else:
            training.load(folder)
        results.append((training.steps(STEPS), training.digest()))
        training.backend.close()
    return results[0], results[1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.resumes")
    parser.add_argument("--ranks", action="store_true")
    if parser.parse_args().ranks and not started_by_torchrun():
        return again_on_ranks(2, "tests.resumes")
    folder = Path(from_rank_0(tempfile.mkdtemp))
    for case in CASES:
        wanted, found = resume(folder / case, case)
        assert wanted == found, (case, wanted, found)
        if os.environ.get("RANK", "0") == "0":
            print(f"{case}: resumed to the bit", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
