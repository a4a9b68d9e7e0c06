"""What a rank holds and sends in a step of many microbatches, between two hosts:
python -m tests.held_on_hosts.

The hosts are network namespaces. A table says, at the median of five steps of 1F1B, how
much the process grows, which the plan says it does by, and what the network interface
counts beside the plan's metrics.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
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


def _mebibytes(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith(key))
    return int(line.split()[1]) / 1024


def _row(count: int) -> tuple[Any, ...]:
    """Microbatches, MiB that a step adds, MiB planned, MB sent, and MB counted."""
    torch._dynamo.reset()
    model, rank = Chain(0.0), dist.get_rank()
    x = torch.randn(count * ROWS, LENGTH, WIDTH)
    schedule, grown, sent = schedules.one_f_one_b(2, count), [], []
    with fxsched.backend(schedule, ["blocks.4"], profile=True) as backend:
        step = torch.compile(model, backend=backend)
        for number in range(-2, STEPS):
            model.zero_grad()
            ctypes.CDLL("libc.so.6").malloc_trim(
                0
            )  # what is free is the system's again
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
            held, before = _mebibytes("VmRSS"), sent_by_host()
            step(x).backward()
            peak = _mebibytes("VmHWM")
            dist.barrier()
            if number >= 0:
                grown.append(peak - held)
                sent.append(sent_by_host() - before)
        assert backend.plan is not None
        planned = backend.plan.memory[rank].at_once
        moving = (planned.gradients + planned.activations) / 2**20
        told = backend.metrics.workers[rank].sent
    middle = statistics.median(sent)
    shown = f"{statistics.median(grown):.1f}", f"{moving:.1f}", f"{told / 1e6:.2f}"
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
        heads = ("rank", "microbatches", "a step adds MiB", "planned MiB")
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
