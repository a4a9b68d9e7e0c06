"""Ranks of a test that do without torchrun: they are forked from a process that has
imported what each would import in several seconds. They find each other as under
torchrun, by its variables and at a store that none of them holds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from tests.torchrun import ONE_THREAD
from tests.traced_once import stages_traced_once

IMPORTED = ["torch._dynamo", "torch.testing", "tests.traced_once", "fxsched.cli.main"]


def run_ranks(
    processes: int, module: str, *arguments: str, seconds: float = 400
) -> subprocess.CompletedProcess[str]:
    """Runs a module of tests/ on so many ranks, all of which must end well; its output
    holds what they print."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = ONE_THREAD | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        started = []
        for rank in range(processes):
            own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            what = own, outputs, module, arguments
            started.append(context.Process(target=_run, args=what))
            started[-1].start()
        _join(started, time.monotonic() + seconds)
        stdout, stderr = (path.read_text() for path in outputs)
    codes = [process.exitcode for process in started]
    assert not any(codes), f"ranks ended with {codes}\n{stdout}{stderr}"
    return subprocess.CompletedProcess([module, *arguments], 0, stdout, stderr)


def _join(started: list[multiprocessing.process.BaseProcess], until: float) -> None:
    """Waits for all; once one has failed or time is up, the others are killed."""
    running = {process.sentinel: process for process in started}
    while running:
        ended = wait(running, max(until - time.monotonic(), 0))
        failed = [running.pop(each).exitcode for each in ended]  # type: ignore[index]
        if not ended or any(failed):
            for process in running.values():
                process.kill()
                process.join()
            return


def _run(
    variables: dict[str, str],
    outputs: list[Path],
    module: str,
    arguments: tuple[str, ...],
) -> None:
    for path, stream in zip(outputs, (sys.stdout, sys.stderr), strict=True):
        opened = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ |= variables
    sys.argv = [module, *arguments]
    with stages_traced_once():
        runpy.run_module(module, run_name="__main__", alter_sys=True)
