"""Ranks of a test: a module of tests/ under torchrun, on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ONE_THREAD = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def torchrun(
    processes: int,
    module: str,
    *arguments: str,
    seconds: float = 400,
    restarts: int = 0,
) -> subprocess.CompletedProcess[str]:
    """Runs a module on so many ranks, all of which must end well, if need be after so
    many restarts; its output holds what they print."""
    *python, m = launcher(processes)
    done = subprocess.run(
        [*python, f"--max-restarts={restarts}", m, module, *arguments],
        cwd=ROOT,
        env=os.environ | ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def again_on_ranks(processes: int, module: str) -> int:
    """This command once more, on ranks; its exit status."""
    command = [*launcher(processes), module, *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=ONE_THREAD | os.environ).returncode


def launcher(processes: int) -> list[str]:
    """The command line up to the name of the module."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(processes)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m"),
    ]
