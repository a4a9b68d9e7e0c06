"""Hosts that a slow network joins: steps beside torch's, predicted and measured.

The hosts are network namespaces on a bridge. Tbf limits each of their links to the
rates in turn, while the ranks stay up. At each rate the network is measured as `fxsched
network` does, and steps are predicted on that. Blocks sleep instead of computing;
messages and gradients are real.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.forked_ranks import shell
from tests.kill_saves import free_port
from tests.namespaces import enter, host, limit

ROOT = Path(__file__).parents[2]
RANKS = "tests.bench.hosts_race"
INSIDE, OPTIONS = "BENCH_NAMESPACES", "BENCH_OPTIONS"
BRIDGE, HOSTS = "BENCH_BRIDGE", "BENCH_HOSTS"
ADDRESS = "10.9.1.{}"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--hosts", type=int, default=2, help="(2)")
    add("--per", type=int, default=1, metavar="N", help="ranks of a host (1)")
    rates = [1000.0, 200.0, 50.0]
    add("--rates", type=float, nargs="+", default=rates, metavar="MBIT", help="in turn")
    add("--rounds", type=int, default=5, help="of all contestants at each rate (5)")
    add("--only", nargs="+", metavar="NAME", help="contestants (all)")
    add("--forward", type=float, default=15.6, metavar="MS", help="of a block (15.6)")
    add("--microbatches", type=int, default=8, help="(8)")
    add("--prefetch", type=int, default=1, help="of fxsched's contestants (1)")
    parser.set_defaults(run=run, workers=0)


def run(options: argparse.Namespace) -> int:
    """This command once more in a network namespace of its own, then its hosts."""
    if INSIDE not in os.environ:
        own = ["unshare", "--map-root-user", "--net"]
        if subprocess.run([*own, "true"], capture_output=True).returncode:
            print("network namespaces aren't allowed here, so nothing was measured")
            return 0
        command = [*own, sys.executable, "-m", "tests.bench", *sys.argv[1:]]
        environment = os.environ | {INSIDE: "1"}
        return subprocess.run(command, cwd=ROOT, env=environment).returncode
    with hosts(options.hosts) as namespaces:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            BRIDGE: f"/proc/{os.getpid()}/ns/net",
            HOSTS: " ".join(namespaces),
            OPTIONS: " ".join(sys.argv[2:]),
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes"]
        torchrun += [str(options.hosts), "--nproc-per-node", str(options.per)]
        torchrun += ["--master-addr", ADDRESS.format(1)]
        torchrun += ["--master-port", str(free_port())]
        agents = [
            subprocess.Popen(
                [*enter(there), *torchrun, "--node-rank", str(i), "-m", RANKS],
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
def hosts(count: int) -> Iterator[list[str]]:
    """Network namespaces on a bridge in this one, by their files."""
    shell(*["ip", "link", "add", "br0", "type", "bridge"])
    shell(*["ip", "link", "set", "br0", "up"])
    with ExitStack() as stack:
        yield [
            stack.enter_context(host(f"p{i}", ADDRESS.format(i + 1), "master", "br0"))
            for i in range(count)
        ]


def limit_all(megabits: float, bridge: str, namespaces: Sequence[str]) -> None:
    """Lets each host send and receive so much; bridge: the bridge's namespace."""
    for number, there in enumerate(namespaces):
        limit(enter(there), "eth0", megabits)
        limit(enter(bridge), f"p{number}", megabits)
