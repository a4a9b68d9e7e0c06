"""Network namespaces as hosts of a test or benchmark, and links of limited speed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.forked_ranks import shell
from tests.kill_saves import free_port

ROOT = Path(__file__).parents[1]
INSIDE = "FXSCHED_TESTS_OWN_NETWORK"
ADDRESS = "10.9.1.{}"


def alone(module: str, *options: str) -> int | None:
    """Runs a module once more, in a network namespace of its own, and gives its exit
    status; None if this is that run. A machine that doesn't allow it runs nothing."""
    if INSIDE in os.environ:
        return None
    own = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*own, "true"], capture_output=True).returncode:
        print("network namespaces aren't allowed here, so nothing was run")
        return 0
    command = [*own, sys.executable, "-m", module, *options]
    environment = os.environ | {INSIDE: "1"}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


@contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """Namespaces on a bridge in this one, by their files."""
    shell(*["ip", "link", "add", "br0", "type", "bridge"])
    shell(*["ip", "link", "set", "br0", "up"])
    with ExitStack() as stack:
        yield [
            stack.enter_context(host(f"p{i}", ADDRESS.format(i + 1), "master", "br0"))
            for i in range(count)
        ]


def torchrun(
    namespaces: Sequence[str], per: int, module: str, given: Mapping[str, str]
) -> int:
    """Runs a module on so many ranks of each host; the worst exit status.

    given: environment variables.
    """
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **given,
    }
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", str(len(namespaces)), "--nproc-per-node", str(per)]
    command += ["--master-addr", ADDRESS.format(1), "--master-port", str(free_port())]
    agents = [
        subprocess.Popen(
            [*enter(there), *command, "--node-rank", str(i), "-m", module],
            cwd=ROOT,
            env=environment,
        )
        for i, there in enumerate(namespaces)
    ]
    try:
        return max(agent.wait() for agent in agents)
    finally:
        for agent in agents:
            agent.kill()


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
