"""Network namespaces as hosts of a test or benchmark, and links of limited speed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.forked_ranks import shell


@contextmanager
def host(port: str, address: str, *outside: str) -> Iterator[str]:
    """A namespace with a device eth0 of this address, joined to the device `port` of
    this namespace; its file. outside: more of `ip link set` for that device."""
    process = subprocess.Popen(["unshare", "--net", "sleep", "3600"])
    there = f"/proc/{process.pid}/ns/net"
    try:
        while os.readlink(there) == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        peer = ("peer", "name", "eth0", "netns", str(process.pid))
        shell("ip", "link", "add", port, "type", "veth", *peer)
        shell("ip", "link", "set", port, "up", *outside)
        shell(*enter(there), "ip", "link", "set", "lo", "up")
        shell(*enter(there), "ip", "addr", "add", f"{address}/24", "dev", "eth0")
        shell(*enter(there), "ip", "link", "set", "eth0", "up")
        yield there
    finally:
        process.kill()
        process.wait()


def enter(there: str) -> list[str]:
    """What a command in a namespace begins with."""
    return ["nsenter", f"--net={there}"]


def limit(at: Sequence[str], device: str, megabits: float) -> None:
    """Lets a device send so much a second; at: what a command there begins with."""
    burst = "1mbit" if megabits >= 1000 else "32kbit"
    shape = f"root tbf rate {megabits}mbit burst {burst} latency 50ms".split()
    shell(*at, "tc", "qdisc", "replace", "dev", device, *shape)
