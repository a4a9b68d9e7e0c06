"""Benchmarks of fxsched: `python -m tests.bench dag` and its options.

One that runs models starts itself under torchrun: ranks on loopback, one thread each,
and an allocator that gives no memory back while it runs, the same for every contestant.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..encoders import MODELS
from . import (
    auto,
    choose,
    congestion,
    contrastive,
    converge,
    dag,
    first,
    gloo,
    gpu,
    hosts,
    lengths,
    limits,
    memory,
    norms,
    overhead,
    plan,
    predict,
    race,
    save,
    search,
    shards,
    simulate,
    sleep,
    stale,
    table,
    trunk,
    trunk_sleep,
    updates,
    varying,
)

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
    towers = commands.add_parser(
        "dag", help="two towers: fxsched, and pipelines of the same model as a line"
    )
    add = towers.add_argument
    add("--workers", type=int, default=2, help="ranks (2)")
    add("--microbatches", type=int, nargs="+", default=[2, 4, 8], metavar="B")
    add("--steps", type=int, default=20, help="of each contestant (20)")
    add("--schedule", nargs="+", help="of fxsched's library (graph)")
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
    towers.set_defaults(check=_check_dag, run=dag.run)
    pairs = commands.add_parser("contrastive", help=_first(contrastive.__doc__))
    contrastive.add_options(pairs)
    _add_converge(commands.add_parser("converge", help=_first(converge.__doc__)))
    _add_first(commands.add_parser("first", help=_first(first.__doc__)))
    gpu.add_options(commands.add_parser("gpu", help=_first(gpu.__doc__)))
    hosts.add_options(commands.add_parser("hosts", help=_first(hosts.__doc__)))
    sums = commands.add_parser("congestion", help=_first(congestion.__doc__))
    congestion.add_options(sums)
    lengths.add_options(commands.add_parser("lengths", help=_first(lengths.__doc__)))
    _add_limits(commands.add_parser("limits", help=_first(limits.__doc__)))
    norms.add_options(commands.add_parser("norms", help=_first(norms.__doc__)))
    _add_overhead(commands.add_parser("overhead", help=_first(overhead.__doc__)))
    _add_peers(commands.add_parser("peers", help=_first(race.__doc__)))
    _add_memory(commands.add_parser("memory", help=_first(memory.__doc__)))
    _add_plan(commands.add_parser("plan", help=_first(plan.__doc__)))
    _add_predict(commands.add_parser("predict", help=_first(predict.__doc__)))
    _add_simulate(commands.add_parser("simulate", help=_first(simulate.__doc__)))
    save.add_options(commands.add_parser("save", help=_first(save.__doc__)))
    _add_search(commands.add_parser("search", help=_first(search.__doc__)))
    _add_shards(commands.add_parser("shards", help=_first(shards.__doc__)))
    _add_sleep(commands.add_parser("sleep", help=_first(sleep.__doc__)))
    _add_stale(commands.add_parser("stale", help=_first(stale.__doc__)))
    table.add_options(commands.add_parser("table", help=_first(table.__doc__)))
    auto.add_options(commands.add_parser("auto", help=_first(auto.__doc__)))
    chosen = commands.add_parser("choose", help=_first(choose.__doc__))
    chosen.set_defaults(run=choose.run, workers=0)
    trunk.add_options(commands.add_parser("trunk", help=_first(trunk.__doc__)))
    asleep = commands.add_parser("trunk_sleep", help=_first(trunk_sleep.__doc__))
    trunk_sleep.add_options(asleep)
    _add_updates(commands.add_parser("updates", help=_first(updates.__doc__)))
    varying.add_options(commands.add_parser("varying", help=_first(varying.__doc__)))
    options = parser.parse_args(arguments)
    if "check" in options:
        options.check(options, parser)
    if "json" in options and options.json is not None:
        options.json = options.json.absolute()
    return options


def _first(text: str | None) -> str:
    return (text or "").split("\n")[0].rstrip(".")


def _add_converge(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, default=4, dest="pipeline", metavar="W", help="(4)")
    add("--steps", type=int, default=160, help="of the optimizer (160)")
    add("--seeds", type=int, default=3, help="of model and batches (3)")
    parser.set_defaults(run=converge.run, workers=0)


def _add_first(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="processes of each contestant (5)")
    add("--blocks", type=int, default=8, help="of the model (8)")
    add("--width", type=int, default=256, help="(256)")
    add("--length", type=int, default=128, help="tokens of a sequence (128)")
    add("--vocabulary", type=int, default=4096, help="(4096)")
    add("--batch", type=int, default=32, help="(32)")
    add("--compiler", choices=first.PLAIN, default="eager", help="of the stages")
    add("--only", nargs="+", choices=first.SCHEDULES, help="of fxsched's contestants")
    add("--json", type=Path, metavar="F", help="write the results to a file as well")
    add("--one", help=argparse.SUPPRESS)  # a contestant, in this process
    parser.set_defaults(run=first.run, workers=0)


def _add_overhead(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--microbatches", type=int, default=64, help="(64)")
    add("--rows", type=int, default=4, help="of a microbatch (4)")
    add("--width", type=int, default=64, help="(64)")
    add("--steps", type=int, default=40, help="of each contestant (40)")
    add("--gloo", action="store_true", help="between two ranks, against the peer")
    parser.set_defaults(run=overhead.run, workers=0)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, default=64, dest="planned", metavar="W", help="(64)")
    add("--stages", type=int, metavar="S", help="as many as workers, unless given")
    sizes = [16, 64, 256]
    add("--microbatches", type=int, nargs="+", default=sizes, metavar="B")
    names = tuple(plan.SCHEDULES)
    add("--schedules", nargs="+", choices=names, default=["1f1b"], help="(1f1b)")
    both = ["one", "all"]
    add("--programs", nargs="+", choices=both, default=both, help="of one rank, of all")
    parser.set_defaults(run=plan.run, workers=0)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_planned(parser, ["1f1b", "auto"])
    shares = [1.0, 0.8, 0.6, 0.5, 0.4]
    add("--shares", nargs="*", type=float, default=shares, help="(1 .8 .6 .5 .4)")
    add("--parked", nargs="*", default=(), choices=tuple(limits.PARKED), help="()")
    add("--transport", choices=("distributed", "gloo"), help="(distributed)")
    add("--steps", type=int, default=12, help="of each plan (12)")
    parser.set_defaults(run=limits.run)


def _add_planned(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Options of a model, and of schedules to plan it by."""
    add = parser.add_argument
    _add_language(parser)
    add("--schedules", nargs="+", default=names, help=f"({' '.join(names)})")
    add("--model", choices=["gpt", *MODELS], default="gpt", help="(gpt)")


def _add_predict(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_planned(parser, ["ddp", "gpipe", "1f1b", "interleaved", "zb_h1"])
    add("--optimizer", action="store_true", help="AdamW, in the program")
    add("--steps", type=int, default=20, help="of each schedule (20)")
    add("--json", type=Path, metavar="F", help="write the results to a file as well")
    parser.set_defaults(run=predict.run)


def _add_peers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_language(parser)
    add("--compiled", action="store_true", help="with Inductor, peers too")
    names = "contestants by name, * for any part of it; and those they are held against"
    add("--only", nargs="+", default=["*"], metavar="NAME", help=names)
    add("--steps", type=int, default=20, help="of each contestant (20)")
    add("--tries", type=int, default=4, help="splits that each peer tries (4)")
    add("--alone-every", type=int, default=1, help="rounds, for one process (1)")
    add("--json", type=Path, metavar="F", help="write the results to a file as well")
    parser.set_defaults(run=race.run)


def _add_memory(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_language(parser)
    add("--compiled", action="store_true", help="with Inductor, peers too")
    add("--adamw", action="store_true", help="with the optimizer, peers too")
    add("--only", nargs="+", choices=memory.NAMES, default=memory.NAMES, metavar="NAME")
    add("--steps", type=int, default=4, help="of each contestant, after the first (4)")
    add("--json", type=Path, metavar="F", help="write the results to a file as well")
    parser.set_defaults(each=memory.each, run=memory.run)


def _add_language(parser: argparse.ArgumentParser) -> None:
    """Options of a language model, its batch and its workers."""
    add = parser.add_argument
    add("--workers", type=int, default=2, help="ranks (2)")
    add("--microbatches", type=int, default=8, help="(8)")
    add("--layers", type=int, default=8, help="blocks of the model (8)")
    add("--width", type=int, default=256, help="(256)")
    add("--length", type=int, default=128, help="tokens of a sequence (128)")
    add("--vocabulary", type=int, default=4096, help="(4096)")
    add("--batch", type=int, default=32, help="(32)")


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--stages", type=int, default=64, help="(64)")
    sizes = [64, 256, 1024, 4096, 15625]
    add("--microbatches", type=int, nargs="+", default=sizes, metavar="B")
    add("--parallelsim", type=Path, metavar="F", help="a parallelsim.py to race")
    add("--large", action="store_true", help="4096 workers and 2 million jobs too")
    parser.set_defaults(run=simulate.run, workers=0)


def _add_search(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rows", type=int, nargs="+", metavar="I", help="of the reference (all)")
    add("--effort", type=float, default=1.0, help="of each search (1)")
    add("--seed", type=int, default=0, help="(0)")
    parser.set_defaults(run=search.run, workers=0)


def _add_shards(parser: argparse.ArgumentParser) -> None:
    _add_language(parser)
    add = parser.add_argument
    add("--steps", type=int, default=20, help="of each contestant (20)")
    names = shards.NAMES
    add("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.set_defaults(each=shards.each)


def _add_sleep(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, default=4, help="ranks (4)")
    shapes = list(sleep.BRANCHES)
    add("--shapes", nargs="+", choices=shapes, default=shapes, help="(both)")
    add("--microbatches", type=int, help="(twice the workers)")
    f = "milliseconds of a rank's F of a microbatch, B takes twice as long (20)"
    add("--forward", type=float, default=20.0, metavar="MS", help=f)
    add("--rows", type=int, default=4, help="of a microbatch (4)")
    add("--steps", type=int, default=20, help="of each contestant (20)")
    add("--compare", action="store_true", help="print where a step parts from its plan")
    add("--json", type=Path, metavar="F", help="write the results to a file as well")
    parser.set_defaults(check=_check_sleep, run=sleep.run)


def _check_sleep(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    least = 4 if "tree" in options.shapes else 2
    if options.workers < least:
        parser.error(f"--workers: {' and '.join(options.shapes)} take {least} or more")
    count = options.microbatches
    if count is not None and (count < 1 or count % options.workers):
        parser.error("--microbatches: the interleaved peer takes a multiple of workers")
    if min(options.rows, options.steps) < 1 or options.forward <= 0:
        parser.error("--rows and --steps start at 1, and --forward above 0")


def _check_dag(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
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


def launch(workers: int, arguments: Sequence[str]) -> int:
    """The same command on every rank of torchrun; its exit code."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(workers)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
        *("-m", "tests.bench", *arguments),
    ]
    return subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT).returncode


def _add_stale(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[4, 8], dest="workers_each")
    parser.set_defaults(run=stale.run, workers=0)


def _add_updates(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_language(parser)
    names = list(updates.RIVALS)
    add("--only", nargs="+", choices=names, default=names, metavar="NAME")
    add("--steps", type=int, default=20, help="of each contestant (20)")
    add("--tries", type=int, default=4, help="splits that the peer tries (4)")
    parser.set_defaults(run=updates.run, compiled=False)


def main() -> int:
    options = parse(sys.argv[1:])
    if options.command == "overhead" and options.gloo:
        options.workers, options.run = 2, gloo.run
    if "TORCHELASTIC_RUN_ID" not in os.environ and options.workers:
        if "each" in options:
            each: int = options.each(options, launch)
            return each
        if getattr(options, "json", None) is not None:
            options.json.touch()  # an unwritable file is better known now
            arguments = [*sys.argv[1:], "--json", str(options.json)]
            return launch(options.workers, arguments)
        return launch(options.workers, sys.argv[1:])
    code: int = options.run(options)
    if options.workers:
        # gloo's threads may hold tensors of PyTorch's contestants yet, and abort the
        # process while Python ends (pytorch issue 190489)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
