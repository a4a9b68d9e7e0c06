"""Hosts that a slow network joins: steps beside torch's, predicted and measured.

The hosts are network namespaces on a bridge. Tbf limits each of their links to the
rates in turn, while the ranks stay up. At each rate the network is measured as `fxsched
network` does, and steps are predicted on that. Blocks sleep instead of computing;
messages and gradients are real.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tests.namespaces import alone, enter, hosts, limit, torchrun

RANKS = "tests.bench.hosts_race"
BRIDGE, HOSTS, OPTIONS = "BENCH_BRIDGE", "BENCH_HOSTS", "BENCH_OPTIONS"


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
    add("--prefetch", type=int, help="of fxsched's contestants (fxsched's own)")
    kinds = "KIND=TYPE", "of fxsched's contestants, such as gradients=int8 (none)"
    add("--encode", nargs="+", default=[], metavar=kinds[0], help=kinds[1])
    add("--sums", default="auto", metavar="HOW", help="of fxsched's contestants (auto)")
    parser.set_defaults(run=run, workers=0)


def run(options: argparse.Namespace) -> int:
    """This command once more in a network namespace of its own, then its hosts."""
    code = alone("tests.bench", *sys.argv[1:])
    if code is not None:
        return code
    with hosts(options.hosts) as namespaces:
        given = {
            BRIDGE: f"/proc/{os.getpid()}/ns/net",
            HOSTS: " ".join(namespaces),
            OPTIONS: " ".join(sys.argv[2:]),
        }
        return torchrun(namespaces, options.per, RANKS, given)


def limit_all(megabits: float, bridge: str, namespaces: Sequence[str]) -> None:
    """Lets each host send and receive so much; bridge: the bridge's namespace."""
    for number, there in enumerate(namespaces):
        limit(enter(there), "eth0", megabits)
        limit(enter(bridge), f"p{number}", megabits)
