"""Random training loops: python -m tests.fuzz_loops [--loops N] [--seed S] [--ranks 2].

Each loop trains models by a random schedule and in plain PyTorch over the same
microbatches; what it does is random too: see tests/loops.py. It is equal, refused by a
PlanError, or a failure, whose text is printed with the command that repeats it. With
--ranks the loops run one after the other in one start of torchrun. Ends with 1 if any
failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter

import torch
import torch.distributed as dist

from fxsched import PlanError

from .loops import compare, random_loop
from .random_plans import within
from .torchrun import again_on_ranks

LIMIT = 300  # seconds of a loop


def outcome(seed: int, ranks: int) -> tuple[str, str]:
    """("equal" or "refused" or "failed", why)."""
    torch._dynamo.reset()
    try:
        with within(LIMIT):
            compare(random_loop(seed, ranks), ranks > 0)
    except PlanError as error:
        return "refused", " ".join(str(error).split())
    except Exception as error:
        trace = traceback.format_exc() if "-v" in sys.argv else ""
        lines = str(error).splitlines() or [""]
        return "failed", f"{type(error).__name__}: {lines[0]} {trace}"
    return "equal", ""


def on_all_ranks(result: tuple[str, str]) -> tuple[str, str]:
    """The worst that a rank has to say; each rank has the same in the end."""
    if not dist.is_initialized():
        return result
    everyone: list[tuple[str, str]] = [result] * dist.get_world_size()
    dist.all_gather_object(everyone, result)
    order = ("failed", "refused", "equal")
    worst = min(everyone, key=lambda each: order.index(each[0]))
    return worst[0], f"{worst[1]} (on rank {everyone.index(worst)})" * bool(worst[1])


def run(loops: int, first: int, ranks: int) -> int:
    """Runs the loops of seeds from `first`; 1 if any failed."""
    start, kinds = time.perf_counter(), Counter[str]()
    loud = not dist.is_initialized() or dist.get_rank() == 0
    for seed in range(first, first + loops):
        kind, why = on_all_ranks(outcome(seed, ranks))
        kinds[kind] += 1
        if loud and kind != "equal":
            loop = random_loop(seed, ranks)
            print(f"{kind}: {why}\n{loop}" if kind == "failed" else f"{kind}: {why}")
            again = f"--loops 1 --seed {seed}" + f" --ranks {ranks}" * (ranks > 0)
            print(f"  python -m tests.fuzz_loops {again}", flush=True)
        if kind == "failed" and ranks and not why.startswith("Differs"):
            break  # what other ranks wait for now is not known
    if loud:
        counts = ", ".join(f"{kinds[k]} {k}" for k in ("equal", "refused", "failed"))
        print(
            f"{sum(kinds.values())} loops: {counts}; "
            f"{time.perf_counter() - start:.0f} s"
        )
    return int(kinds["failed"] > 0)


def main() -> int:
    """Parses the command line; starts ranks unless it is one."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz_loops", description=__doc__
    )
    parser.add_argument("--loops", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first loop")
    parser.add_argument("--ranks", type=int, default=0, help="processes; 0 is threads")
    parser.add_argument("-v", action="store_true", help="with tracebacks")
    options = parser.parse_args()
    if options.ranks and "RANK" not in os.environ:
        return again_on_ranks(options.ranks, "tests.fuzz_loops")
    torch.set_num_threads(1)
    if options.ranks:
        dist.init_process_group("gloo")
    try:
        return run(options.loops, options.seed, options.ranks)
    finally:
        if options.ranks:
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
