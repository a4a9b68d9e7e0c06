"""What a rank holds and sends in a step of many microbatches, between two hosts:
python -m tests.held_on_hosts.

The hosts are network namespaces. A table says, at the median of five steps of 1F1B, how
much more is allocated at a time than before, beside what the plan says; how much the
process grows, which has malloc's gaps too; and what the network interface counts beside
the plan's metrics.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

import fxsched
from fxsched import schedules
from tests.bench.hosts_race import LENGTH, ROWS, WIDTH, Chain, sent_by_host
from tests.namespaces import alone, hosts, torchrun

COUNTS = (8, 32, 128)
STEPS = 5
SELF = "tests.held_on_hosts"
LIBC = ctypes.CDLL("libc.so.6")


class _Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 gives, in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


LIBC.mallinfo2.restype = _Mallinfo


def _allocated() -> float:
    """MiB that malloc has given and not got back, in all threads."""
    info = LIBC.mallinfo2()
    return float(info.uordblks + info.hblkhd) / 2**20


@contextmanager
def _peak() -> Iterator[list[float]]:
    """The most that is allocated at a time, looked at every ms."""
    most, ended = [_allocated()], threading.Event()

    def look() -> None:
        while not ended.wait(1e-3):
            most[0] = max(most[0], _allocated())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def _mebibytes(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith(key))
    return int(line.split()[1]) / 1024


def _row(count: int) -> tuple[Any, ...]:
    """Rank, microbatches, MiB allocated, planned and grown, MB sent, and counted."""
    torch._dynamo.reset()
    model, rank = Chain(0.0), dist.get_rank()
    x = torch.randn(count * ROWS, LENGTH, WIDTH)
    schedule, sent = schedules.one_f_one_b(2, count), []
    held, grown = list[float](), list[float]()
    with fxsched.backend(schedule, ["blocks.4"], profile=True) as backend:
        step = torch.compile(model, backend=backend)
        for number in range(-2, STEPS):
            model.zero_grad()
            LIBC.malloc_trim(0)  # what is free is the system's again
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
            size, before, start = _mebibytes("VmRSS"), sent_by_host(), _allocated()
            with _peak() as most:
                step(x).backward()
            peak = _mebibytes("VmHWM")
            dist.barrier()
            if number >= 0:
                held.append(most[0] - start)
                grown.append(peak - size)
                sent.append(sent_by_host() - before)
        assert backend.plan is not None
        planned = backend.plan.memory[rank].at_once
        moving = (planned.gradients + planned.activations) / 2**20
        told = backend.metrics.workers[rank].sent
    middle = statistics.median(sent)
    added = (statistics.median(held), moving, statistics.median(grown))
    shown = (*(f"{each:.1f}" for each in added), f"{told / 1e6:.2f}")
    return rank, count, *shown, f"{middle / 1e6:.2f}", f"{middle / told - 1:+.2%}"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for count in COUNTS:
        both: list[Any] = [None, None]
        dist.all_gather_object(both, _row(count))
        rows += both
    if dist.get_rank() == 0:
        heads = ("rank", "microbatches", "a step holds MiB", "planned MiB")
        heads += ("the process grows MiB",)
        counted = ("metrics MB", "interface MB", "off")
        print(tabulate(sorted(rows), [*heads, *counted], "github"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    elif (code := alone(SELF, *sys.argv[1:])) is not None:
        sys.exit(code)
    else:
        with hosts(2) as both:
            sys.exit(torchrun(both, 1, SELF, {}))
