"""Whose buffers a rank has freed: those that its peer has received, and no other.

torchrun --nproc-per-node 2 -m tests.ranks_sent (tests/transport/test_torchrun.py)
"""

from __future__ import annotations

import time
import weakref

import torch
import torch.distributed as dist

from fxsched.transport.helper_threads import Helpers
from fxsched.transport.lane import Lane
from fxsched.transport.processes import _left

SIZE = 1 << 20  # floats, more than a socket's buffer takes


def send() -> None:
    helpers = Helpers()
    leaving, alive = Lane(helpers=helpers), []
    for tag in range(3):
        buffer = torch.full((SIZE,), float(tag))
        alive.append(weakref.ref(buffer))
        leaving.call("", _left, dist.isend(buffer, 1, tag=tag), buffer)
    del buffer
    dist.barrier()  # the peer has two
    until = time.monotonic() + 60
    while any(ref() is not None for ref in alive[:2]):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert alive[2]() is not None
    dist.barrier()
    leaving.finish()
    assert alive[2]() is None
    helpers.end(10)


def receive() -> None:
    for tag in range(3):
        if tag == 2:
            dist.barrier()
            dist.barrier()
        buffer = torch.empty(SIZE)
        dist.recv(buffer, 0, tag=tag)
        assert (buffer == tag).all()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    (send, receive)[dist.get_rank()]()
    dist.destroy_process_group()
