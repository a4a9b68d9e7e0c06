"""Schedules on several hosts, which must be equal to eager PyTorch, with each way to
add up gradients: python -m tests.equal_hosts [--hosts 2] [NAME ..].

The hosts are network namespaces, and have four ranks together. Names are of SCHEDULES.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxsched
from fxsched import schedules
from fxsched.jobs.schedule import Schedule
from tests.namespaces import alone, hosts, torchrun
from tests.passes.test_sums_in_pieces import Net

SUMS = ("auto", "messages", "pieces", "ring")
SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "ddp": lambda: schedules.ddp(4, 8),
    "fsdp": lambda: schedules.fsdp(4, 8),
    "hsdp": lambda: schedules.hsdp(4, 2, 8),
    "zero2": lambda: schedules.zero2(4, 8),
    "1f1b": lambda: schedules.one_f_one_b(4, 8),
    "zb_v": lambda: schedules.zb_v(4, 8),
    "graph": lambda: schedules.graph(4, 8),
    "fslpp": lambda: schedules.fslpp(4, 2, 8),
    "shards": lambda: schedules.sharded(schedules.ddp(2, 8), 2),
    "stale": lambda: schedules.stale_by_one(4, 8),
}


def train(schedule: Schedule, sums: Any, x: Tensor) -> None:
    """Three steps; parameters are eager's, and owners' gradients have the same bits."""
    torch._dynamo.reset()
    model, eager = Net(8), Net(8)
    stale = schedule.update_every is not None
    mine, other = (torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (model, eager))
    given = {"optimizer": mine} if stale else {}
    with fxsched.backend(schedule, sums=sums, **given) as backend:
        step = torch.compile(model, backend=backend)
        for _ in range(3):
            loss = step(x)
            if stale:
                (wanted,) = fxsched.replay(backend.plan, eager, other, [x])
                torch.testing.assert_close(loss.item(), wanted)
                continue
            wanted = eager(x)
            torch.testing.assert_close(loss, wanted)
            for each, optimizer in ((loss, mine), (wanted, other)):
                each.backward()
                if each is loss:
                    same_bits(model, schedule.shards)
                optimizer.step()
                optimizer.zero_grad()
    state = fxsched.full_state_dict(model)
    for key, value in eager.state_dict().items():
        torch.testing.assert_close(state[key], value)


def round_trip(schedule: Schedule, x: Tensor) -> None:
    """A step whose gradients travel in int8: owners' have the same bits."""
    torch._dynamo.reset()
    model, eager = Net(8), Net(8)
    encode = {"gradients": torch.int8}
    with fxsched.backend(schedule, encode=encode) as backend:
        torch.compile(model, backend=backend)(x).backward()
    eager(x).backward()
    same_bits(model, schedule.shards)
    if schedule.shards == 1:
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            if mine.grad is not None and other.grad is not None:
                error = (mine.grad - other.grad).norm() / other.grad.norm()
                assert error < 0.03, error


def same_bits(model: nn.Module, shards: int) -> None:
    """Of each gradient, or part of one, on all workers that have it."""
    rank, own = dist.get_rank(), dict[tuple[str, int], Tensor]()
    for name, p in model.named_parameters():
        if p.grad is not None:
            own[name, rank % shards] = p.grad
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    first: dict[tuple[str, int], Tensor] = {}
    for gradients in everyone:
        for key, gradient in gradients.items():
            assert torch.equal(first.setdefault(key, gradient), gradient), key


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    x = torch.randn(16, 128)
    names = os.environ[CHOSEN].split() or SCHEDULES
    for name in names:
        for sums in SUMS:
            train(SCHEDULES[name](), sums, x)
            if dist.get_rank() == 0:
                print(f"{name}, sums={sums!r}: equal to eager", flush=True)
        if SCHEDULES[name]().update_every is None:
            round_trip(SCHEDULES[name](), x)
            if dist.get_rank() == 0:
                print(f"{name}, gradients in int8: owners' are equal", flush=True)
    dist.barrier()
    dist.destroy_process_group()


CHOSEN = "TESTS_SCHEDULES"

if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    elif (code := alone("tests.equal_hosts", *sys.argv[1:])) is not None:
        sys.exit(code)
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--hosts", type=int, default=2)
        parser.add_argument("names", nargs="*")
        options = parser.parse_args()
        with hosts(options.hosts) as all_hosts:
            given = {CHOSEN: " ".join(options.names)}
            each = 4 // options.hosts
            sys.exit(torchrun(all_hosts, each, "tests.equal_hosts", given))
