"""Random plans for as long as asked: python -m tests.soak --hours H.

Each is of a seed, checked, run and compared with eager PyTorch (tests/random_plans.py).
--ranks N runs them over N processes, half of them by gloo alone. What is not equal, is
an error or takes over a minute is printed with its seed; `--first SEED --count 1` runs
it again. Ends with 1 if there was one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist

from .random_plans import assert_equals_eager, random_case, within
from .torchrun import again_on_ranks

EVERY = 100  # seeds from one line to the next


def wrong(seed: int, ranks: int) -> str | None:
    """What is wrong with the plan of a seed, if anything."""
    torch._dynamo.reset()
    transport = ("distributed", "gloo")[seed % 2] if ranks else "threads"
    try:
        with within(60):
            assert_equals_eager(random_case(seed, ranks or None), transport)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def together(flag: bool, ranks: int) -> bool:
    """What rank 0 says."""
    said = torch.tensor(int(flag))
    if ranks:
        dist.broadcast(said, 0)
    return bool(said)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--hours", type=float, default=1.0, help="at most (1)")
    parser.add_argument("--first", type=int, default=0, help="seed (0)")
    parser.add_argument("--count", type=int, help="seeds at most; without end")
    parser.add_argument("--ranks", type=int, default=0, help="processes; 0 is threads")
    options = parser.parse_args()
    if options.ranks and "RANK" not in os.environ:
        return again_on_ranks(options.ranks, "tests.soak")
    if options.ranks:
        dist.init_process_group("gloo")
    end = time.monotonic() + 3600 * options.hours
    seed, failed, count = options.first, 0, options.count
    while together(time.monotonic() < end, options.ranks):
        if count is not None and seed >= options.first + count:
            break
        text = wrong(seed, options.ranks)
        rank = os.environ.get("RANK", "0")
        if text is not None:
            failed += 1
            print(f"rank {rank}, seed {seed}: {text}", flush=True)
        seed += 1
        if rank == "0" and not (seed - options.first) % EVERY:
            print(f"seeds {options.first} to {seed - 1}: {failed} failed", flush=True)
    if os.environ.get("RANK", "0") == "0":
        done = seed - options.first
        print(f"{done - failed} of {done} plans equal eager")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
