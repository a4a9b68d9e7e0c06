"""Ranks whose messages go through a process group for each directed edge, as those of
GPUs do: python -m tests.ranks_devices CASE ..

The groups are gloo's, of tensors on the CPU, and matched by order alone; of NCCL if the
first CASE is "nccl".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxsched
from fxsched import schedules
from fxsched.ir.step import Message
from fxsched.runtime import ranks
from fxsched.transport.device_groups import DeviceGroups
from fxsched.transport.processes import BACKENDS, DeviceEndpoint
from tests.cases import MICROBATCHES, assert_equal, build, eager_step, train

SCHEDULES: dict[str, Callable[[int], fxsched.Schedule]] = {
    "ddp": lambda w: schedules.ddp(w, MICROBATCHES),
    "fsdp": lambda w: schedules.fsdp(w, MICROBATCHES),
    "zero2": lambda w: schedules.zero2(w, MICROBATCHES),
    "1f1b": lambda w: schedules.one_f_one_b(w, MICROBATCHES),
    "interleaved": lambda w: schedules.interleaved(w, MICROBATCHES),
    "zb_v": lambda w: schedules.zb_v(w, MICROBATCHES),
    "fslpp": lambda w: schedules.fslpp(w, 2, MICROBATCHES),
    "graph": lambda w: schedules.graph(w, MICROBATCHES),
}
FEWER = ("1f1b", "zb_v", "fslpp")  # on more than two ranks


def equal() -> None:
    """Training equals eager PyTorch, and each edge that a plan uses has a group, as do
    workers that add up sums."""
    names = SCHEDULES if dist.get_world_size() == 2 else FEWER
    for number, name in enumerate(names):
        torch._dynamo.reset()
        model, inputs = build("two_tower" if number % 2 else "gpt")
        reference, _ = build("two_tower" if number % 2 else "gpt")

        def eager(model=reference, inputs=inputs) -> Tensor:
            return eager_step(model, inputs, MICROBATCHES)

        backend = fxsched.backend(SCHEDULES[name](dist.get_world_size()))
        compiled = torch.compile(model, backend=backend)

        def step(run=compiled, inputs=inputs) -> Tensor:
            loss = run(*inputs)
            loss.backward()
            return loss

        wanted, found = train(reference, eager, "sgd"), train(model, step, "sgd")
        mine = {n for n, gradient in found.gradients.items() if gradient is not None}
        assert_equal(found, wanted, mine)
        messages = [each for each in backend.plan.lines if isinstance(each, Message)]
        sent = {frozenset(m.among) or (m.source, m.to) for m in messages}
        (processes,) = [each for each in BACKENDS if not each.closed.is_set()]
        assert processes.groups is not None and set(processes.groups.groups) == sent
        backend.close()
        print(f"rank {dist.get_rank()} {name}: equal to eager over {len(sent)} groups")


class Fails(nn.Module):
    """The second layer, of rank 1, raises an error once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum()


def failure() -> None:
    """What fails on one rank is told to the other; after a reset both go on."""
    backend = fxsched.backend(schedules.gpipe(2, 2), ["second"], timeout=60)
    model, x = Fails(), torch.ones(4, 4)
    run = torch.compile(model, backend=backend)
    run(x).backward()
    take, rank = DeviceEndpoint.take, dist.get_rank()

    def fails(self: DeviceEndpoint, parcel: object) -> object:
        if rank:
            raise ValueError("of rank 1")
        return take(self, parcel)

    began = time.monotonic()
    with mock.patch.object(DeviceEndpoint, "take", fails):
        try:
            run(x).backward()
        except Exception as error:
            print(f"rank {rank}: {type(error).__name__}: {str(error).splitlines()[0]}")
    assert time.monotonic() - began < 40
    backend.reset()
    model.zero_grad()
    run(x).backward()
    print(f"rank {rank} goes on")


class Late:
    """An event that a device doesn't come to."""

    def query(self) -> bool:
        return False


def watch() -> None:
    """A rank whose device waits in vain says for whom and which job, and fails."""
    backend = fxsched.backend(schedules.gpipe(2, 2), ["second"], timeout=10)
    run = torch.compile(Fails(), backend=backend)
    x, rank = torch.ones(4, 4), dist.get_rank()
    run(x).backward()
    (processes,) = BACKENDS
    if rank == 0:
        endpoint = processes.endpoint_of_run()
        assert isinstance(endpoint, DeviceEndpoint)
        endpoint.awaited.append((Late(), 1, "job 0B0"))
        endpoint.finish()
    time.sleep(14)
    try:
        run(x)
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {error}")


def _break(groups: DeviceGroups) -> None:
    """What DeviceGroups.abort does, for gloo, which has no abort: a receive that comes
    too late closes a connection."""
    for edge, group in groups.groups.items():
        if groups.rank in edge:
            peer = edge[groups.rank == edge[0]]
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), peer, group, tag=9)
                work.wait(timedelta(milliseconds=1))


def main() -> None:
    """Runs the cases on each rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    cases = sys.argv[1:]
    if cases[0] == "nccl":
        torch.set_default_device(torch.device("cuda", dist.get_rank()))
        for case in cases[1:]:
            globals()[case]()
        return
    with (
        mock.patch.object(ranks, "backend_of", lambda device: "gloo"),
        mock.patch.object(DeviceGroups, "abort", _break),
    ):
        for case in cases:
            globals()[case]()


if __name__ == "__main__":
    main()
