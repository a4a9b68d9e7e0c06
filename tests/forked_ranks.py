"""Ranks that are forked, each with a network of its own if its link is to be cut, and
the process that holds their store."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.faults import Trial
from tests.kill_saves import free_port
from tests.ranks_of_faults import work

HANGS = 60.0  # seconds after which a rank prints where it is
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
Report = dict[str, Any]


def shell(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Store:
    """A process that holds the store of all rounds."""

    def __init__(self) -> None:
        self.port = free_port()
        self.process = os.fork()
        if self.process == 0:
            store = dist.TCPStore(
                "0.0.0.0", self.port, None, True, wait_for_workers=False
            )
            while store:
                signal.pause()

    def end(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


class Rank:
    """A forked process that does a round's trials, and what it writes of them."""

    def __init__(
        self, number: int, trials: Sequence[Trial], store: Store, folder: Path
    ) -> None:
        self.number, self.text, self.status = number, "", None
        self.reports, writer = os.pipe()
        self.wired, wire = os.pipe()
        os.set_blocking(self.reports, False)
        self.cut = any(trial.fault == "cut" for trial in trials)
        self.process = os.fork()
        if self.process == 0:
            status = 1
            try:
                os.close(wire)
                self._run(trials, writer, store, folder)
                status = 0
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
                line = {"seed": -1, "rank": number, "what": "wrong", "error": text}
                os.write(writer, f"{json.dumps(line)[:4000]}\n".encode())
            finally:
                os._exit(status)
        os.close(writer)
        os.close(self.wired)
        if self.cut:
            self._wire()
        os.close(wire)

    def _run(
        self, trials: Sequence[Trial], writer: int, store: Store, folder: Path
    ) -> None:
        host, group = "127.0.0.1", f"round {trials[0].seed}"
        if self.cut:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.unshare(NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
            os.write(writer, b"\n")
        os.read(self.wired, 1)  # until the runner has closed its end
        if self.cut:
            host = f"10.7.{self.number}.1"
            shell("ip", "link", "set", "lo", "up")
            shell("ip", "addr", "add", f"10.7.{self.number}.2/24", "dev", "eth0")
            shell("ip", "link", "set", "eth0", "up")
            shell("ip", "route", "add", "default", "via", host)
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        faulthandler.dump_traceback_later(HANGS, repeat=True)
        own = dist.PrefixStore(group, dist.TCPStore(host, store.port, None, False))
        ranks = trials[0].ranks
        dist.init_process_group("gloo", store=own, rank=self.number, world_size=ranks)
        work(trials, writer, folder)

    def _wire(self) -> None:
        """Joins the namespace of the rank to this process's, which routes."""
        while not self.text:
            time.sleep(0.01)
            self.read()
        name = f"rank{self.number}"
        pair = ("type", "veth", "peer", "name", "eth0", "netns", str(self.process))
        shell("ip", "link", "add", name, *pair)
        shell("ip", "addr", "add", f"10.7.{self.number}.1/24", "dev", name)
        shell("ip", "link", "set", name, "up")

    def read(self) -> list[Report]:
        """What it has written so far."""
        with suppress(BlockingIOError):
            self.text += os.read(self.reports, 1 << 20).decode()
        lines = self.text.split("\n")[:-1]
        return [json.loads(line) for line in lines if line]

    def said(self, what: str, seed: int) -> list[Report]:
        return [
            each
            for each in self.read()
            if each["what"] == "wrong" or (each["what"], each["seed"]) == (what, seed)
        ]

    def running(self) -> bool:
        if self.status is None and os.waitpid(self.process, os.WNOHANG)[0]:
            self.status = 0
        return self.status is None

    def end(self) -> None:
        if self.running():
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        os.close(self.reports)
        if self.cut:  # its namespace may outlive it a little
            name = f"rank{self.number}"
            subprocess.run(("ip", "link", "del", name), capture_output=True)
