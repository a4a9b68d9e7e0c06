"""Resident memory of each rank: fxsched beside its peers, in processes of their own.

A peak is the most that a process ever held, from Linux's /proc: Python, PyTorch and its
compilers too. `grown` is how much of it came after the model was built, just before the
first step. That step traces, plans and compiles; `later` is what the steps after it add
to what they find, once free memory was given back. Every pipeline's blocks are dealt
out evenly; gradients are dropped before each step. With --adamw the optimizer steps,
fxsched's in the program. `predicted` is what `plan.memory` says of `later`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate

import fxsched

from . import updates
from .language import Setup
from .measure import Contestant, clear
from .ours import ENTRIES, TENSOR_PARALLEL, enter
from .pipelining import peer
from .rivals import PIPELINES, RIVALS

PAIRS = {  # fxsched's contestants and what they are held against
    "gpipe": "torch-gpipe",
    "1f1b": "torch-1f1b",
    "interleaved": "torch-interleaved",
    "ddp": "torch-ddp",
    "fsdp": "torch-fsdp",
    "shards": "torch-tp-head-whole",
    "shards-whole": "torch-tp-head-whole",
}
TRAINED = {  # the same with AdamW
    "1f1b": "torch-1f1b",
    "ddp": "torch-ddp",
    "zero1": "torch-zero",
    "zero2": "torch-zero",
    "pipedream": "torch-1f1b",
    "pipedream_2bw": "torch-1f1b",
}
PAIRED = [n for pairs in (PAIRS, TRAINED) for pair in pairs.items() for n in pair]
NAMES = tuple(dict.fromkeys([*PAIRED, *TENSOR_PARALLEL]))
MIB = 1 << 20
Built = tuple[Contestant, fxsched.Backend | None]


class Usage(NamedTuple):
    """Bytes of one rank: of the process before its first step, at most, and what the
    later steps add at most to what is there between them; and as its plan has that."""

    before: int
    peak: int
    later: int
    predicted: int | None


def each(
    options: argparse.Namespace, launch: Callable[[int, Sequence[str]], int]
) -> int:
    """Starts every contestant under torchrun, one after the other."""
    pairs = TRAINED if options.adamw else PAIRS
    names = dict.fromkeys(n for pair in pairs.items() for n in pair)
    wanted = [name for name in names if name in options.only]
    found = usages(wanted, partial(launch, options.workers), sys.argv[1:])
    if found is None:
        return 1
    print(table(found, pairs))
    if options.json is not None:
        ranks = {n: [u._asdict() for u in usages] for n, usages in found.items()}
        options.json.write_text(json.dumps(ranks, indent=1) + "\n")
    return 0


def usages(
    names: Sequence[str],
    launch: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
) -> dict[str, list[Usage]] | None:
    """What each rank of each contestant used; None if one failed."""
    found: dict[str, list[Usage]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            file = Path(folder, name)
            if launch([*arguments, "--only", name, "--json", str(file)]):
                return None
            found[name] = [Usage(*usage) for usage in json.loads(file.read_text())]
            print(f"{name} done", flush=True)
    return found


def run(options: argparse.Namespace) -> int:
    """One contestant, on a rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    (name,) = options.only
    make = build_trained if options.adamw else build
    contestant, backend = make(name, Setup.of(options))
    dist.barrier()
    before = status("VmRSS")
    contestant.step()
    clear(contestant.model)
    first = status("VmHWM")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    between = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    for _ in range(options.steps):
        contestant.step()
        clear(contestant.model)
    last = status("VmHWM")
    mine = Usage(before, max(first, last), last - between, predicted(backend))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if not dist.get_rank():
        options.json.write_text(json.dumps(everyone))
    dist.destroy_process_group()
    return 0


def predicted(backend: fxsched.Backend | None) -> int | None:
    """Bytes that come and go in a step on this rank."""
    if backend is None or backend.plan is None:
        return None
    most = backend.plan.memory[dist.get_rank()].at_once
    return int(most.total - most.weights - most.state)


def build_trained(name: str, setup: Setup) -> Built:
    """The contestant with AdamW, as `build` makes it without."""
    workers, blocks = dist.get_world_size(), setup.config.layers
    starts = [blocks * s // workers for s in range(1, workers)]
    if name in ("torch-ddp", "torch-zero"):
        trainer = updates.replicas(setup, name, shared=name == "torch-zero")
    elif name == "torch-1f1b":
        trainer = updates.pipeline(setup, [1 + start for start in starts])
    else:
        schedule = updates.SCHEDULES[name](workers, setup.microbatches)
        lines = TRAINED[name] == "torch-1f1b"
        stages = [f"blocks.{i}" for i in starts] if lines else "auto"
        trainer = updates.ours(setup, name, schedule, stages)
    return trainer.contestant, trainer.backend


def build(name: str, setup: Setup) -> Built:
    """The contestant, with the parameters of other ranks' stages gone if it is a peer;
    fxsched drops them in its first step."""
    if name in RIVALS:
        return RIVALS[name](setup), None
    blocks, stages = setup.config.layers, dist.get_world_size()
    if name.endswith("interleaved"):
        stages *= 2
    starts = [blocks * s // stages for s in range(1, stages)]
    if name not in PIPELINES:
        (entry,) = (e for e in ENTRIES if e.name == name)
        if entry.split == "blocks":
            starts = list(range(1, blocks))
        even = entry.split in ("rival", "blocks")
        names = [f"blocks.{i}" for i in starts]
        return enter(entry, setup, names if even else "auto")
    line, cuts = setup.line(), [1 + start for start in starts]
    for i, part in enumerate(line.parts):
        stage = sum(cut <= i for cut in cuts)
        if stage % dist.get_world_size() != dist.get_rank():
            for parameter in part.module.parameters():
                parameter.data = torch.empty(0)
    kind = PIPELINES[name]
    return peer(kind, line, setup.microbatches, cuts, setup.compiled)[0], None


def status(key: str) -> int:
    """Bytes in a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{key}:"))
    return 1024 * int(kilobytes)


def table(found: dict[str, list[Usage]], pairs: Mapping[str, str]) -> str:
    """MiB of each rank, and the ratio of the fullest ranks to the peer's."""

    def sizes(usages: Sequence[int]) -> str:
        return " ".join(f"{size / MIB:.0f}" for size in usages)

    rows = []
    for name, usages in found.items():
        peaks = [usage.peak for usage in usages]
        grown = [usage.peak - usage.before for usage in usages]
        later = [usage.later for usage in usages]
        plans = [u.predicted for u in usages if u.predicted is not None]
        row = [name, sizes(peaks), sizes(grown), sizes(later), sizes(plans)]
        if rival := found.get(pairs.get(name, "")):
            row.append(f"{max(peaks) / max(u.peak for u in rival):.3f}")
            row.append(f"{max(later) / max(u.later for u in rival):.3f}")
        rows.append(row)
    return tabulate(
        rows,
        [
            *("contestant", "peak MiB", "grown", "later", "predicted"),
            *("peak / rival", "later / rival"),
        ],
        colalign=("left", *("right",) * 6),
        disable_numparse=True,
    )
