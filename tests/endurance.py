"""What a process holds stays level: python -m tests.endurance --steps 2000 --ranks 2.

Trains by ddp, fsdp with the optimizer in the program, 1f1b in dynamic order with a
flight record, and zb_h1. From the first tenth of the steps to the last no thread,
descriptor or live tensor may be added, and resident memory may not grow by more than
1 MiB. --ranks 0 (the default) runs threads of one process.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fxsched
from fxsched import Schedule, schedules
from tests.cases import MICROBATCHES, build
from tests.torchrun import again_on_ranks

WARM = 10  # steps
GROWTH = 1 << 20  # bytes
Case = tuple[Schedule, dict[str, Any]]


def cases(folder: str) -> dict[str, Case]:
    """Schedules, and what is asked of the backend besides."""
    record = {"order": "dynamic", "flight_record": folder}
    return {
        "ddp": (schedules.ddp(2), {}),
        "fsdp": (schedules.fsdp(2), {"optimizer": True}),
        "1f1b": (schedules.one_f_one_b(2, MICROBATCHES), record),
        "zb_h1": (schedules.zb_h1(2, MICROBATCHES), {}),
    }


class Held(NamedTuple):
    """What a process holds: bytes that are resident, and counts."""

    memory: int
    threads: int
    descriptors: int
    tensors: int

    @staticmethod
    def now() -> Held:
        """After what is garbage has been collected."""
        gc.collect()
        with open("/proc/self/statm") as figures:
            resident = int(figures.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        tensors = 0
        for each in gc.get_objects():
            with suppress(ReferenceError):  # a weak proxy of what has gone
                tensors += issubclass(type(each), torch.Tensor)
        return Held(
            resident,
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
            tensors,
        )


def loop(schedule: Schedule, options: dict[str, Any]) -> tuple[Any, Any]:
    """One step of training, and its backend."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inside = options.pop("optimizer", False)
    more = {"optimizer": optimizer} if inside else {}
    backend = fxsched.backend(schedule, **options, **more)
    run = torch.compile(model, backend=backend)

    def step() -> None:
        loss = run(*inputs)
        if not inside:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step, backend


def endure(step: Callable[[], None], steps: int, every: int) -> list[Held]:
    """What is held after step WARM, and after every so many from then on."""
    held = []
    for number in range(1, steps + 1):
        step()
        if number == WARM or (number > WARM and number % every == 0):
            held.append(Held.now())
    return held


def grown(held: list[Held]) -> list[str]:
    """What is more in all of the last tenth than it ever was in the first: values that
    are on their way to a rank come and go."""
    tenth = max(1, len(held) // 10)
    said = []
    for name in Held._fields:
        before = max(getattr(each, name) for each in held[: tenth + 1])
        after = min(getattr(each, name) for each in held[-tenth:])
        if name == "memory" and after > before + GROWTH:
            said.append(f"memory by {(after - before) / 2**20:.1f} MiB")
        elif name != "memory" and after > before:
            said.append(f"{name} from {before} to {after}")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.endurance")
    parser.add_argument("--steps", type=int, default=2000, help="of each (2000)")
    parser.add_argument("--every", type=int, default=100, help="steps (100)")
    parser.add_argument("--ranks", type=int, default=0, choices=(0, 2))
    options = parser.parse_args()
    if options.ranks and "RANK" not in os.environ:
        return again_on_ranks(options.ranks, "tests.endurance")
    if options.ranks:
        dist.init_process_group("gloo")
    rank, failed = os.environ.get("RANK", "0"), 0
    with tempfile.TemporaryDirectory() as folder:
        for name, (schedule, more) in cases(folder).items():
            step, backend = loop(schedule, more)
            with backend:
                held = endure(step, options.steps, options.every)
            wrong = grown(held)
            failed += bool(wrong)
            first, last = (
                f"{each.memory / 2**20:.1f} MiB, {each.threads} threads, "
                f"{each.descriptors} descriptors, {each.tensors} tensors"
                for each in (held[0], held[-1])
            )
            text = f"rank {rank}, {name}: step {WARM} {first}; step {options.steps} "
            print(
                text + last + "; grew: " + (", ".join(wrong) or "nothing"), flush=True
            )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
