"""Benchmarks of fxsched: `python -m tests.bench dag` and its options.

A benchmark starts itself under torchrun: ranks on loopback, one thread each, and an
allocator that gives no memory back while it runs, the same for every contestant.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEEP = 32 << 20  # bytes; glibc takes no larger mmap_threshold
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={KEEP}"
    f":glibc.malloc.trim_threshold={1 << 40}",
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__.split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    dag = commands.add_parser(
        "dag", help="two towers: fxsched, and pipelines of the same model as a line"
    )
    add = dag.add_argument
    add("--workers", type=int, default=2, help="ranks (2)")
    add("--microbatches", type=int, nargs="+", default=[2, 4, 8], metavar="B")
    add("--steps", type=int, default=20, help="of each contestant (20)")
    add("--schedule", nargs="+", help="of fxsched: graph, interleaved, by-hand, 1f1b")
    add("--order", choices=("static", "dynamic"), default="static")
    add("--tries", type=int, default=4, help="splits that each peer tries (4)")
    add("--layers", type=int, nargs=3, default=[3, 3, 2], metavar=("A", "B", "HEAD"))
    add("--width", type=int, help="256, or 16 with --sleep")
    add("--length", type=int, help="tokens of a sequence: 128, or 4 with --sleep")
    add("--batch", type=int, default=32)
    add("--vocabulary", type=int, help="4096, or 64 with --sleep")
    sleep = "blocks sleep, SECONDS (0.16) for F of a batch: workers without cores"
    add("--sleep", type=float, nargs="?", const=0.16, default=0.0, help=sleep)
    add("--plan", action="store_true", help="print fxsched's plans too")
    add("--json", type=Path, metavar="F", help="write the results to a file as well")
    options = parser.parse_args(arguments)
    for name, small, full in (
        ("width", 16, 256),
        ("length", 4, 128),
        ("vocabulary", 64, 4096),
    ):
        if getattr(options, name) is None:
            setattr(options, name, small if options.sleep else full)
    for count in options.microbatches:
        if count < 1 or options.batch % count:
            parser.error(
                f"--microbatches {count} doesn't divide --batch {options.batch}"
            )
    if min(options.workers, options.steps, options.tries) < 1:
        parser.error("--workers, --steps and --tries start at 1")
    if options.json is not None:
        options.json = options.json.absolute()
    return options


def launch(workers: int, arguments: Sequence[str]) -> int:
    """The same command on every rank of torchrun; its exit code."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(workers)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
        *("-m", "tests.bench", *arguments),
    ]
    return subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT).returncode


def main() -> int:
    options = parse(sys.argv[1:])
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        if options.json is not None:
            options.json.touch()  # an unwritable file is better known now
            arguments = [*sys.argv[1:], "--json", str(options.json)]
            return launch(options.workers, arguments)
        return launch(options.workers, sys.argv[1:])
    from . import dag

    return dag.run(options)


if __name__ == "__main__":
    sys.exit(main())
