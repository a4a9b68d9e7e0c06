"""The ranks of `python -m tests.bench hosts`; see hosts.py."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn.parallel import DistributedDataParallel

import fxsched
from fxsched import schedules
from fxsched.cli.network_command import measured_network
from fxsched.jobs.job import Direction
from fxsched.transport.processes import Processes

from . import hosts
from .measure import Contestant, check, clear, slowest
from .naps import calibrate, nap, weigh

BLOCKS, WIDTH, LENGTH, ROWS = 8, 256, 128, 4


class Block(nn.Module):
    """As many weights and as large messages as a transformer's block of that width; F,
    the B of its input and the B of its weights sleep equally long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12 * WIDTH, WIDTH) / 100)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        row = weigh(self.weight.sum(0) / 100, self.seconds)
        return nap(x + row, self.seconds / ROWS, backward=1.0)


class Chain(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block(seconds) for _ in range(BLOCKS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


class Race:
    """All contestants, on the same batch."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        self.count, self.seconds = options.microbatches, options.forward / 1e3
        self.prefetch: int | None = options.prefetch
        pairs = (each.split("=") for each in options.encode)
        self.sums: str = options.sums
        self.encode = {kind: getattr(torch, word) for kind, word in pairs}
        torch.manual_seed(1)
        self.x = torch.randn(self.count * ROWS, LENGTH, WIDTH)
        self.backends: dict[str, fxsched.Backend] = {}
        every: dict[str, Callable[[], Contestant]] = {
            "torch-ddp": self.ddp,
            "torch-fsdp": lambda: self.fsdp(True),
            "torch-fsdp-kept": lambda: self.fsdp(False),
            "torch-1f1b": lambda: self.pipeline("torch-1f1b", Schedule1F1B, 1),
            "torch-gpipe": lambda: self.pipeline("torch-gpipe", ScheduleGPipe, 1),
            "torch-interleaved": lambda: self.pipeline(
                "torch-interleaved", ScheduleInterleaved1F1B, 2
            ),
        }
        for name, stages in (
            *(("ddp", 0), ("fsdp", BLOCKS), ("1f1b", self.workers)),
            *(("gpipe", self.workers), ("zb_h1", self.workers)),
            ("interleaved", 2 * self.workers),
        ):
            every[name] = lambda name=name, stages=stages: self.ours(name, stages)
        names = options.only or every
        self.contestants = [every[name]() for name in names]
        self.times = _block_times(self.seconds)

    def ours(self, name: str, stages: int) -> Contestant:
        """stages: how many of equally many blocks; 0 for fxsched's own cut."""
        model = Chain(self.seconds)
        cuts = [f"blocks.{BLOCKS * s // stages}" for s in range(1, stages)]
        schedule = schedules.LIBRARY[name](self.workers, self.count)
        given: Any = {"prefetch": self.prefetch, "encode": self.encode}
        given["sums"] = self.sums
        backend = fxsched.backend(schedule, cuts if stages else "auto", **given)
        self.backends[name] = backend
        step: Any = torch.compile(model, backend=backend)
        return Contestant(name, model, lambda: step(self.x).backward())

    def ddp(self) -> Contestant:
        model = Chain(self.seconds)
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        *first, last = self.x.chunk(self.count)[self.rank :: self.workers]

        def step() -> None:
            with wrapped.no_sync():
                for rows in first:
                    (wrapped(rows) / (len(first) + 1)).backward()
            (wrapped(last) / (len(first) + 1)).backward()

        return Contestant("torch-ddp", model, step)

    def fsdp(self, reshard: bool) -> Contestant:
        model: Any = Chain(self.seconds)
        mesh = init_device_mesh("cpu", (self.workers,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        mine = self.x.chunk(self.count)[self.rank :: self.workers]

        def step() -> None:
            for rows in mine:
                model.set_requires_gradient_sync(rows is mine[-1])
                (model(rows) / len(mine)).backward()

        return Contestant("torch-fsdp" + "-kept" * (not reshard), model, step)

    def pipeline(self, name: str, kind: Any, per_rank: int) -> Contestant:
        model, stages = Chain(self.seconds), per_rank * self.workers
        parts = [
            model.blocks[BLOCKS * s // stages : BLOCKS * (s + 1) // stages]
            for s in range(stages)
        ]
        here = [
            PipelineStage(parts[s], s, stages, torch.device("cpu"))
            for s in range(self.rank, stages, self.workers)
        ]
        schedule = kind(
            here if per_rank > 1 else here[0],
            self.count,
            loss_fn=lambda out, _: out.square().mean() / self.count,
            scale_grads=False,
        )
        given = (self.x,) if self.rank == 0 else ()
        target = self.x[:, :1] if self.rank == self.workers - 1 else None

        def step() -> None:
            schedule.step(*given, target=target, return_outputs=False)

        return Contestant(name, model, step)

    def check(self) -> None:
        """Ends every rank unless all that don't round have eager's gradients."""
        awake = Chain(0.0)
        for rows in self.x.chunk(self.count):
            (awake(rows) / self.count).backward()
        wanted = {n: p.grad for n, p in awake.named_parameters() if p.grad is not None}
        for each in self.contestants:
            if not (self.encode and each.name in self.backends):  # which rounds
                check(each, wanted)

    def predicted(self, name: str, network: fxsched.Network) -> float:
        """Seconds of a step on this network."""
        plan = self.backends[name].plan
        assert plan is not None
        f, b = (BLOCKS / len(plan.stages) * each for each in self.times)
        split = any(job.direction is Direction.WEIGHT for job in plan.jobs)
        times = {"F": f, "B": b / 2, "W": b / 2} if split else {"F": f, "B": b}
        return plan.simulate(times, network).latency

    def measure(self, rounds: int) -> dict[str, list[tuple[float, float]]]:
        """Of each step: seconds of the slowest rank, and bytes of the host that sends
        the most. The contestants take turns, once before it counts."""
        taken: dict[str, list[tuple[float, float]]] = {}
        for number in range(-1, rounds):
            for each in self.contestants:
                clear(each.model)
                dist.barrier()
                before, start = sent_by_host(), time.perf_counter()
                each.step()
                seconds = time.perf_counter() - start
                dist.barrier()  # of others on this host, too
                step = slowest([seconds, sent_by_host() - before]).tolist()
                if number >= 0:
                    taken.setdefault(each.name, []).append((step[0], step[1]))
        return taken

    def lines(
        self, rounds: int, network: fxsched.Network
    ) -> tuple[list[tuple[str, ...]], str]:
        """A row of each contestant at the present rate, and what came of the order in
        which steps are predicted."""
        taken = self.measure(rounds)
        medians = {n: statistics.median(t for t, _ in s) for n, s in taken.items()}
        predicted = {name: self.predicted(name, network) for name in self.backends}
        rows = []
        for name, median in medians.items():
            sent = statistics.median(b for _, b in taken[name]) / 1e6
            cells = [name, f"{sent:.1f}", f"{median:.3f}", "", "", ""]
            if name in self.backends:
                step = predicted[name]
                cells[3:5] = f"{step:.3f}", f"{step / median - 1:+.0%}"
            peers = [f"torch-{name}", f"torch-{name}-kept"]
            peer = min((medians[p] for p in peers if p in medians), default=None)
            if peer is not None:
                cells[5] = f"{median / peer:.3f}"
            rows.append(tuple(cells))
        return rows, _chosen({name: medians[name] for name in predicted}, predicted)


def _block_times(seconds: float) -> list[float]:
    """Seconds of a block's F and B: medians of each rank while all are busy, then the
    mean of ranks."""
    block, taken = Block(seconds), []
    for _ in range(9):
        x = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
        dist.barrier()
        begins = time.perf_counter()
        y = block(x)
        middle = time.perf_counter()
        y.backward(y)
        taken.append((middle - begins, time.perf_counter() - middle))
    own = torch.tensor([statistics.median(each) for each in zip(*taken, strict=True)])
    dist.all_reduce(own)
    return (own / dist.get_world_size()).tolist()


def _chosen(medians: Mapping[str, float], predicted: Mapping[str, float]) -> str:
    """The contestant of the shortest predicted step, beside the fastest; pairs whose
    steps are predicted in the wrong order, and differ by more than a tenth."""
    if not predicted:
        return ""
    first, fastest = min(predicted, key=predicted.__getitem__), min(medians.values())
    wrong = [
        f"{one} and {other}"
        for one, other in permutations(predicted, 2)
        if predicted[one] < predicted[other] and medians[one] > 1.1 * medians[other]
    ]
    ratio = medians[first] / fastest
    pairs = f"; predicted in the wrong order: {', '.join(wrong) or 'none'}"
    return f"predicted to be the fastest: {first}, {ratio:.3f} of the fastest{pairs}"


def sent_by_host() -> int:
    """Bytes that this host has sent, with all headers."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (counts,) = (each.split(":")[1] for each in lines if "eth0:" in each)
    return int(counts.split()[8])


def main() -> None:
    parser = argparse.ArgumentParser()
    hosts.add_options(parser)
    options = parser.parse_args(os.environ[hosts.OPTIONS].split())
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    dist.barrier()
    calibrate()
    race = Race(options)
    race.check()
    headers = "|MB a host sends|step s|predicted s|off|to torch's"
    bridge = os.environ[hosts.BRIDGE]
    for rate in options.rates:
        dist.barrier()
        if race.rank == 0:
            hosts.limit_all(rate, bridge, os.environ[hosts.HOSTS].split())
        dist.barrier()
        begins = time.perf_counter()
        processes = Processes(race.workers, what="the network's measure")
        network = measured_network(processes)[0]
        processes.close()
        taken = time.perf_counter() - begins
        rows, chosen = race.lines(options.rounds, network)
        if race.rank == 0:
            speed = network.between
            print(
                f"\n{options.hosts} hosts of {options.per}, {rate:g} Mbit/s; measured "
                f"in {taken:.1f} s: {speed.bandwidth * 8e-6:.0f} Mbit/s, "
                f"{speed.latency * 1e3:.2g} ms, both ways {speed.duplex:.2f} x\n"
            )
            align = ("left", *("right",) * 5)
            print(
                tabulate(
                    rows,
                    headers.split("|"),
                    "github",
                    colalign=align,
                    disable_numparse=True,
                ),
                f"\n{chosen}",
                sep="\n",
                flush=True,
            )
    for backend in race.backends.values():
        backend.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
