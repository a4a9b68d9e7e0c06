"""The speed table: three models on two ranks, beside PyTorch in one process, DDP, FSDP2
and torch.distributed.pipelining; `--write` puts it into README.md and docs/speed.md.

A contestant's step is F and B of the whole batch; the optimizer is left out.
Contestants take their steps in turn, a step lasts as long as on its slowest rank,
ratios are taken in each round, and the table has their medians. Before it is timed, a
contestant's gradients must be eager PyTorch's on the whole batch. Where rows of the
batch meet, as in CLIP's loss and in BatchNorm, the peers compute another loss, and the
table says so.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import fxsched
from fxsched import Schedule, schedules

from .language import Setup
from .measure import Contestant, check, measure
from .pipelining import best_cuts, peer
from .table_models import Model, clip, language, three_encoders

ROOT = Path(__file__).parents[2]
COMMAND = "python -m tests.bench table --write"
MODELS = ("nanogpt", "encoders", "clip")
TOLERANCE = {False: 1e-4, True: 1e-3}  # of gradients; through 20 BatchNorms, in float32
PEERS = {  # by the columns of the README's table
    "one process": ("all cores",),
    "DDP": ("DDP",),
    "FSDP2": ("FSDP2", "FSDP2, kept"),
    "torch's 1F1B": ("torch's 1F1B",),
}


class Row(NamedTuple):
    """A contestant's line: seconds of its steps; ours: whether it is fxsched's."""

    name: str
    seconds: list[float]
    ours: bool
    same: bool


class Found(NamedTuple):
    """What was measured of a model."""

    title: str
    rows: list[Row]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    add = parser.add_argument
    add("--workers", type=int, default=2, help="ranks (2)")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(all)")
    add("--microbatches", type=int, default=8, help="of pipelines (8)")
    add("--layers", type=int, default=8, help="blocks of a model (8)")
    add("--width", type=int, default=256, help="(256)")
    add("--length", type=int, default=128, help="tokens of a sequence (128)")
    add("--vocabulary", type=int, default=4096, help="(4096)")
    add("--batch", type=int, default=32, help="(32)")
    add("--steps", type=int, default=12, help="of each contestant (12)")
    add("--tries", type=int, default=3, help="splits that torch's 1F1B tries (3)")
    add("--write", action="store_true", help="put it into README.md and docs/speed.md")
    parser.set_defaults(run=run, compiled=False)


def run(options: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    setup = Setup.of(options)
    makers = {
        "nanogpt": lambda: language(setup),
        "clip": lambda: clip(setup),
        "encoders": lambda: three_encoders(setup),
    }
    found = []
    for name in options.models:
        found.append(compare(makers[name](), setup, options))
        if not dist.get_rank():
            print(f"{full_table(found[-1:])}\n", flush=True)
    if not dist.get_rank():
        print(short_table(found))
        if options.write:
            write(ROOT / "docs" / "speed.md", full_table(found))
            write(ROOT / "README.md", short_table(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def compare(model: Model, setup: Setup, options: argparse.Namespace) -> Found:
    """Checks and times all contestants of a model."""
    eager = model.make()
    eager(*model.inputs.values()).backward()
    named = eager.named_parameters()
    wanted = {name: p.grad for name, p in named if p.grad is not None}
    racers = [(each, False) for each in rivals(model, setup, options.tries)]
    racers += [(each, True) for each in ours(model, setup.microbatches)]
    same = {}
    for each, is_ours in racers:
        same[each.name] = is_ours or not model.meet or each.name in ALONE
        if same[each.name]:
            check(each, wanted, TOLERANCE[model.meet])
        else:
            each.step()
    taken = measure([each for each, _ in racers], options.steps)
    rows = [Row(c.name, taken[id(c)], own, same[c.name]) for c, own in racers]
    return Found(model.title, rows)


ALONE = ("one core", "all cores")


def rivals(model: Model, setup: Setup, tries: int) -> Iterator[Contestant]:
    """PyTorch's."""
    for name, threads in zip(ALONE, (1, dist.get_world_size()), strict=True):
        yield alone(model, name, threads)
    yield ddp(model)
    yield fsdp(model, "FSDP2", True)
    yield fsdp(model, "FSDP2, kept", False)
    cuts = best_cuts(Schedule1F1B, model.line, setup.microbatches, tries)
    pipeline, _ = peer(Schedule1F1B, model.line(), setup.microbatches, cuts)
    pipeline.name = "torch's 1F1B"
    yield pipeline


def alone(model: Model, name: str, threads: int) -> Contestant:
    """The whole batch on rank 0; the others wait in a barrier, off their core."""
    module, inputs = model.make(), model.inputs.values()

    def step() -> None:
        if not dist.get_rank():
            torch.set_num_threads(threads)
            module(*inputs).backward()
            torch.set_num_threads(1)

    return Contestant(name, module, step)


def own_rows(model: Model) -> list[Tensor]:
    """A rank's share of the batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return [x.chunk(ranks)[rank] for x in model.inputs.values()]


def ddp(model: Model) -> Contestant:
    module, mine = model.make(), own_rows(model)
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    return Contestant("DDP", module, lambda: wrapped(*mine).backward())


def fsdp(model: Model, name: str, reshard: bool) -> Contestant:
    """fully_shard of each block and of the rest; reshard: reshard_after_forward."""
    module, mine = model.make(), own_rows(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks(module):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    scalars = {p for p in module.parameters() if not p.dim()}  # which it refuses
    fully_shard(module, mesh=mesh, ignored_params=scalars)
    return Contestant(name, module, lambda: module(*mine).backward())


def ours(model: Model, count: int) -> Iterator[Contestant]:
    """fxsched's. With global-batch stages all rows are on one worker at a time, so that
    data parallelism gains nothing where rows meet."""
    workers = dist.get_world_size()
    made = {
        "1f1b": schedules.one_f_one_b(workers, count),
        "1f1b, ahead=2": schedules.one_f_one_b(workers, count, ahead=2),
        "graph": schedules.graph(workers, count),
    }
    if not model.meet:
        whole = {
            "ddp": schedules.ddp(workers, workers),
            "fsdp": schedules.fsdp(workers, workers),
        }
        made = whole | made
    for name, schedule in made.items():
        yield entry(model, f"fxsched {name}", schedule)


def entry(model: Model, name: str, schedule: Schedule) -> Contestant:
    module = model.make()
    step = torch.compile(module, backend=fxsched.backend(schedule))
    inputs = model.inputs.values()
    return Contestant(name, module, lambda: step(*inputs).backward())


def ratio(row: Row, other: Row) -> float:
    """The median over rounds."""
    pairs = zip(row.seconds, other.seconds, strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def full_table(found: Sequence[Found]) -> str:
    """All contestants, each model's fastest first."""
    parts = []
    for title, rows in found:
        whole = next(row for row in rows if row.name == "all cores")
        median = {row.name: statistics.median(row.seconds) for row in rows}
        cells = [
            (
                _title(row),
                f"{1000 * median[row.name]:.0f}",
                f"{ratio(row, whole):.3f}",
                "yes" if row.same else "no",
            )
            for row in sorted(rows, key=lambda row: median[row.name])
        ]
        heads = (title, "ms", "ratio to all cores", "whole batch's loss")
        parts.append(tabulate(cells, heads, "pipe", disable_numparse=True))
    return "\n\n".join(parts)


def short_table(found: Sequence[Found]) -> str:
    """fxsched's fastest of each model, beside the fastest of each kind of peer."""
    cells = []
    for title, rows in found:
        named = {row.name: row for row in rows}
        best = _fastest([row for row in rows if row.ours])
        beside = []
        for names in PEERS.values():
            other = _fastest([named[name] for name in names])
            mark = "" if other.same else " (another loss)"
            beside.append(f"{ratio(best, other):.2f}{mark}")
        cells.append((title, f"`{best.name.removeprefix('fxsched ')}`", *beside))
    heads = ("step time of fxsched divided by that of", "schedule", *PEERS)
    return tabulate(cells, heads, "pipe", disable_numparse=True)


def _fastest(rows: Sequence[Row]) -> Row:
    return min(rows, key=lambda row: statistics.median(row.seconds))


def _title(row: Row) -> str:
    name = row.name
    if row.ours:
        return f"**fxsched** `{name.removeprefix('fxsched ')}`"
    return f"one process, {name}" if name in ALONE else name


def write(page: Path, table: str) -> None:
    """Puts a table in the place of the one that this command made before."""
    start, end = f"<!-- {COMMAND} -->\n", "\n<!-- end -->"
    between = re.compile(f"(?<={re.escape(start)}).*?(?={re.escape(end)})", re.S)
    text, count = between.subn(lambda _: table, page.read_text())
    if count != 1:
        raise SystemExit(f"{page} has {count} tables of {COMMAND}; it needs one")
    page.write_text(text)
