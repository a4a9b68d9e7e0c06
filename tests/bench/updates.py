"""Steps with AdamW in the program, beside PyTorch's pipelines, DDP and ZeRO 1.

A step is loss, gradients and the optimizer's. Contestants take theirs in turn; a step
lasts as long as on its slowest rank. Before it is timed, the parameters that a
contestant leaves after two steps must be eager PyTorch's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import Schedule1F1B

import fxsched
from fxsched import Schedule, schedules

from . import rivals
from .language import Setup
from .measure import Contestant, clear, fail, measure
from .ours import ahead
from .pipelining import best_cuts, peer

RATE = 1e-3
EPS = 1e-4  # so large that a gradient of nothing but rounding moves no weight
CHECKED = 2  # steps, after which parameters are compared
TOLERANCE = 1e-2  # of parameters, as a share of the rate
SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType(
    {
        "1f1b": schedules.one_f_one_b,
        "1f1b-ahead": ahead,
        "ddp": schedules.ddp,
        "zero1": schedules.zero1,
        "zero2": schedules.zero2,
        "pipedream": schedules.pipedream,
        "pipedream_2bw": schedules.pipedream_2bw,
    }
)
RIVALS = MappingProxyType(
    {
        "1f1b": "torch-1f1b",
        "1f1b-ahead": "torch-1f1b",
        "ddp": "torch-ddp",
        "zero1": "torch-zero",
        "zero2": "torch-zero",
    }
)


@dataclass
class Trainer:
    """A contestant, the names of the parameters that are right on this rank, and the
    backend, if it is fxsched's."""

    contestant: Contestant
    names: Callable[[], Iterable[str]]
    backend: fxsched.Backend | None = None


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=RATE, eps=EPS)


def ours(
    setup: Setup, name: str, schedule: Schedule, stages: str | list[str]
) -> Trainer:
    model = setup.model()
    backend = fxsched.backend(schedule, stages, optimizer=adamw(model.parameters()))
    compiled = torch.compile(model, backend=backend)

    def names() -> set[str]:
        assert backend.plan is not None
        rank = dist.get_rank()
        groups = [group for group in backend.plan.groups if rank in group.owners]
        return {name for group in groups if group.givers for name in group.names}

    contestant = Contestant(name, model, lambda: compiled(*setup.inputs))
    return Trainer(contestant, names, backend)


def pipeline(setup: Setup, cuts: Sequence[int]) -> Trainer:
    """Each rank steps the parameters of its own stage."""
    line = setup.line()
    contestant, _ = peer(Schedule1F1B, line, setup.microbatches, cuts)
    bounds = list(itertools.pairwise([0, *cuts, len(line.parts)]))
    here = line.parts[slice(*bounds[dist.get_rank()])]
    parameters = [p for part in here for p in part.module.parameters()]
    optimizer, step = adamw(parameters), contestant.step

    def train() -> None:
        step()
        optimizer.step()

    contestant.name, contestant.step = "torch-1f1b", train
    own = {id(p) for p in parameters}
    names = [name for name, p in line.model.named_parameters() if id(p) in own]
    return Trainer(contestant, lambda: names)


def replicas(setup: Setup, name: str, shared: bool) -> Trainer:
    """DDP, and AdamW on all ranks or its state shared by them."""
    contestant = rivals.ddp(setup)
    model, step = contestant.model, contestant.step
    optimizer: torch.optim.Optimizer
    if shared:
        kind = torch.optim.AdamW
        optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=RATE, eps=EPS)
    else:
        optimizer = adamw(model.parameters())

    def train() -> None:
        step()
        optimizer.step()

    contestant.name, contestant.step = name, train
    return Trainer(contestant, lambda: [name for name, _ in model.named_parameters()])


def wanted(setup: Setup) -> dict[str, Tensor]:
    """Parameters that eager PyTorch has after CHECKED steps in one process."""
    model = setup.model()
    optimizer = adamw(model.parameters())
    for _ in range(CHECKED):
        optimizer.zero_grad()
        for piece in setup.pieces():
            (model(*piece) / setup.microbatches).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def check(trainer: Trainer, expected: Mapping[str, Tensor]) -> None:
    """Ends every rank unless, between them, they have all of eager's parameters."""
    contestant = trainer.contestant
    for _ in range(CHECKED):
        clear(contestant.model)
        contestant.step()
    parameters = dict(contestant.model.named_parameters())
    errors = {
        name: float((parameters[name].detach() - expected[name]).abs().max()) / RATE
        for name in trainer.names()
    }
    everyone: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, errors)
    seen = {name for each in everyone for name in each}
    contestant.error, name = max((e, n) for each in everyone for n, e in each.items())
    if missing := sorted(set(expected) - seen):
        fail(f"{contestant.name}: no rank updates {', '.join(missing)}")
    if not contestant.error <= TOLERANCE:
        fail(
            f"{contestant.name}: {name} is off eager's by {contestant.error:.1e} of "
            f"the learning rate; {TOLERANCE} is allowed"
        )


def race(setup: Setup, options: argparse.Namespace) -> dict[str, Trainer]:
    """The contestants that were asked for, and their rivals."""
    pairs = {name: rival for name, rival in RIVALS.items() if name in options.only}
    workers, count = dist.get_world_size(), setup.microbatches
    trainers: dict[str, Trainer] = {}
    cuts: tuple[int, ...] = ()
    if "torch-1f1b" in pairs.values():
        cuts = best_cuts(Schedule1F1B, setup.line, count, options.tries)
        trainers["torch-1f1b"] = pipeline(setup, cuts)
    for name, shared in (("torch-ddp", False), ("torch-zero", True)):
        if name in pairs.values():
            trainers[name] = replicas(setup, name, shared)
    parts = setup.line().parts
    modules = [parts[cut].name for cut in cuts]
    for name in pairs:
        schedule = SCHEDULES[name](workers, count)
        stages = modules if name == "1f1b" else "auto"
        trainers[name] = ours(setup, name, schedule, stages)
    return trainers


def run(options: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    setup = Setup.of(options)
    trainers, expected = race(setup, options), wanted(setup)
    for trainer in trainers.values():
        check(trainer, expected)
    taken = measure([t.contestant for t in trainers.values()], options.steps)
    if not dist.get_rank():
        seconds = {n: taken[id(t.contestant)] for n, t in trainers.items()}
        print(table(trainers, seconds))
    dist.destroy_process_group()
    return 0


def table(
    trainers: Mapping[str, Trainer], seconds: Mapping[str, Sequence[float]]
) -> str:
    rows = []
    for name, trainer in trainers.items():
        rival = RIVALS.get(name, "")
        ratio = ""
        if rival:
            pairs = zip(seconds[name], seconds[rival], strict=True)
            ratio = f"{statistics.median(ours / theirs for ours, theirs in pairs):.3f}"
        median = 1000 * statistics.median(seconds[name])
        rows.append(
            (name, f"{median:.0f}", ratio, rival, f"{trainer.contestant.error:.0e}")
        )
    return tabulate(
        rows,
        ["contestant", "ms", "/ rival", "rival", "error"],
        colalign=("left", "right", "right", "left", "right"),
        disable_numparse=True,
    )
