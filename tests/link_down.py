"""Two hosts whose network goes down in a step: python -m tests.link_down.

For 5 seconds: the step goes on, and the losses are those of threads. For good: each
rank prints whom it waits for after 10 seconds, and stops soon after the timeout with an
error that names the rank, the call and the job; also the rank whose store is on the
other host. The hosts are network namespaces, which need root.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fxsched
from fxsched import schedules
from tests.forked_ranks import shell
from tests.kill_saves import free_port
from tests.several_machines import second_machine
from tests.torchrun import ONE_THREAD, ROOT

INSIDE = "FXSCHED_TEST_NAMESPACES"
LEFT_OUT = "network namespaces aren't allowed here"
TIMEOUT, LATE = 14.0, 2.0  # seconds of the backends, and that errors may come later
STEPS, DOWN = 60, 5.0
START = 100.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers(x)).square().mean()


def train() -> None:
    """A rank, or threads: prints losses, or when and how it failed."""
    model, x = Net(), torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = schedules.one_f_one_b(2, 4)
    run = torch.compile(model, backend=fxsched.backend(schedule, timeout=TIMEOUT))
    try:
        for _ in range(STEPS):
            loss = run(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss {loss.item().hex()}", flush=True)
            time.sleep(0.02)
    except Exception as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        print(f"{time.time()} {type(error).__name__}: {text}", flush=True)
        os._exit(3)


class Host(NamedTuple):
    """A rank on a host, and the lines that it prints."""

    process: subprocess.Popen[str]
    lines: list[str]
    errors: list[str]
    readers: list[threading.Thread]

    @staticmethod
    def start(rank: int, port: int, at: list[str]) -> Host:
        """at: what a command on the host begins with."""
        environment = {
            **{"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"},
            **{"MASTER_ADDR": "10.9.0.1", "MASTER_PORT": str(port)},
        }
        process = subprocess.Popen(
            [*at, sys.executable, "-m", "tests.link_down", "train"],
            cwd=ROOT,
            env=os.environ | ONE_THREAD | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        lines, errors = list[str](), list[str]()
        pipes = (process.stdout, lines), (process.stderr, errors)
        readers = [
            threading.Thread(None, to.extend, args=(pipe,)) for pipe, to in pipes
        ]
        for reader in readers:
            reader.start()
        return Host(process, lines, errors, readers)

    def losses(self) -> list[str]:
        return [line for line in self.lines if line.startswith("loss ")]


@contextmanager
def training() -> Iterator[list[Host]]:
    """Two hosts in the middle of their training."""
    with second_machine() as there:
        port = free_port()
        hosts = [Host.start(rank, port, at) for rank, at in enumerate(([], there))]
        try:
            until = time.monotonic() + START
            while not all(len(host.losses()) > STEPS // 4 for host in hosts):
                assert time.monotonic() < until, [h.errors[-5:] for h in hosts]
                time.sleep(0.01)
            yield hosts
        finally:
            for host in hosts:
                host.process.kill()
                host.process.wait()
                for reader in host.readers:
                    reader.join()


def for_a_while() -> None:
    """The losses are those of threads."""
    command = [sys.executable, "-m", "tests.link_down", "train"]
    threads = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    with training() as hosts:
        shell("ip", "link", "set", "eth0", "down")
        time.sleep(DOWN)
        assert all(len(host.losses()) < STEPS for host in hosts), "it went on"
        shell("ip", "link", "set", "eth0", "up")
        for host in hosts:
            host.process.wait(TIMEOUT + DOWN)
    for host in hosts:
        assert host.lines == threads.splitlines(True), (host.lines, threads)


def for_good() -> None:
    """Both ranks say whom they wait for, and stop in time."""
    with training() as hosts:
        shell("ip", "link", "set", "eth0", "down")
        down = time.time()
        for host in hosts:
            host.process.wait(2 * TIMEOUT + LATE)
    for rank, host in enumerate(hosts):
        text = "".join(host.lines[len(host.losses()) :])
        when, error = text.split(" ", 1)
        assert float(when) - down < TIMEOUT + LATE, text
        whom = rf"for rank {1 - rank} at call \d+, job \d[FB]\d"
        assert re.search(rf"rank {rank} waited 1[\d.]+ s {whom}", error), error
        line = rf"fxsched: rank {rank} waits 1\d s {whom}"
        assert re.search(line, "".join(host.errors)), host.errors


def main() -> int:
    if sys.argv[1:] == ["train"]:
        train()
        return 0
    if INSIDE in os.environ:
        for_a_while()
        print(f"down for {DOWN:g} s: {STEPS} equal losses", flush=True)
        for_good()
        print("down for good: both ranks named the other", flush=True)
        return 0
    own = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*own, "true"], capture_output=True).returncode:
        print(LEFT_OUT)
        return 0
    command = [*own, sys.executable, "-m", "tests.link_down"]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {INSIDE: "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
