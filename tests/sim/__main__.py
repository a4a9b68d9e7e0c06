"""Training on the simulated device: python -m tests.sim [--workers W] [--models M ..]
[--schedules S ..] [--beside shards | updates] [--threads] [--queues K] [--waits]
[--seed N].

Each schedule of the library trains each model as on GPUs: jobs, sends and receives are
launched to queues, which run late and by chance, or those of messages last. Losses,
gradients and parameters equal those of eager PyTorch on the CPU, no operator reads
memory that isn't filled, and no message is in memory of the host. --beside cuts weights
into shards, or has the programs update the weights. --threads runs the same on threads,
with transport="strict" alone. --waits leaves out
each wait of a step in turn: a wrong value or poison shows it, or the orders of other
messages imply it, which the queues tell. Ends with 1 for any other case.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import fxsched
from fxsched import schedules
from fxsched.schedules import LIBRARY, STALE
from fxsched.transport import strict
from tests.cases import (
    MODELS,
    Result,
    assert_equal,
    eager_step,
    optimizer,
    tied,
    train,
)

from . import queues
from .device import DEVICE
from .run import Wires, simulated

MICROBATCHES = 4
SIZES = {"group_size": 2, "servers": 1, "stages": 4}  # where a schedule takes them


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "gpt": MODELS["gpt"],
    "two_tower": MODELS["two_tower"],
    "tied": tied,
}


def linear() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Of layers that don't keep what they send."""
    layers = [nn.Linear(4, 4) for _ in range(8)]
    return Mean(*layers), (torch.randn(8, 4),)


class Mean(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model and a batch, on the CPU, the same each time."""
    torch.manual_seed(7)
    return (linear if name == "linear" else CASES[name])()


def eager(name: str, count: int, steps: int = 3) -> Result:
    """What training by plain PyTorch gives."""
    model, inputs = made(name)
    if name == "tied":  # a row meets all others: one batch
        count = 1
    return train(model, lambda: eager_step(model, inputs, count), "sgd", steps)


def library(name: str, workers: int) -> fxsched.Schedule:
    """A schedule on so many workers, by the arguments that it takes."""
    make = LIBRARY[name]
    given = SIZES | {"workers": workers, "microbatches": MICROBATCHES}
    given["groups"] = workers // 2
    if name in ("hybrid", "parameter_server"):
        given["workers"] = max(1, workers - 1)
    if name in ("zb_h1", "zb_h2", "zero2", "cuckoo", "overflow", "hybrid"):
        given["microbatches"] = 8
    takes = inspect.signature(make).parameters
    needs = {k: v for k, v in given.items() if k in takes}
    return make(**{k: v for k, v in needs.items() if k != "stages" or _needs(takes[k])})


def _needs(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


def moved(model: nn.Module) -> nn.Module:
    """A model on the device; nn.Module.to would part weights that are tied."""
    new: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight not in new:
                new[weight] = nn.Parameter(weight.detach().to(DEVICE))
            setattr(module, name, new[weight])
    return model.to(DEVICE)


def on_host(found: Result) -> Result:
    """What training gave, on the CPU."""

    parts = tree_map_only(Tensor, Tensor.cpu, vars(found))
    return Result(**parts)


def trained(
    name: str,
    schedule: fxsched.Schedule,
    steps: int = 3,
    moves: bool = False,
    **options: Any,
) -> tuple[Result, list[Wires]]:
    """What training on the device gives, and the wires of each call.

    moves: whether weights get other memory before each step.
    options: of `simulated`, and of fxsched.backend; updates: whether programs update
        the weights; threads: whether threads run it, without the device.
    """
    torch._dynamo.reset()
    queues.poisoned.clear()
    model, inputs = made(name)
    updates, threads = options.pop("updates", False), options.pop("threads", False)
    if not threads:
        model, inputs = moved(model), tuple(each.to(DEVICE) for each in inputs)
    known = inspect.signature(simulated).parameters
    here = {key: options.pop(key) for key in [*options] if key in known}
    if updates:
        options["optimizer"] = optimizer("sgd", model)
    with (
        contextlib.nullcontext([]) if threads else simulated(**here) as wires,
        mock.patch.object(strict, "QUEUES", here.get("count") or strict.QUEUES),
        fxsched.backend(schedule, transport="strict", **options) as backend,
    ):
        compiled = torch.compile(model, backend=backend)

        def step() -> Tensor:
            for weight in model.parameters() if moves else ():
                weight.data = weight.data.clone()
            loss: Tensor = compiled(*inputs)
            if not updates:
                loss.backward()
            return loss

        found = on_host(train(model, step, "sgd", steps))
    assert not queues.poisoned, f"{queues.poisoned[0]} reads memory that isn't filled"
    return found, wires


def run_library(
    names: Sequence[str],
    models: Sequence[str],
    workers: int,
    beside: str | None = None,
    **options: Any,
) -> Iterator[tuple[str, str, str]]:
    """Each schedule and model, and "equal" or what went wrong."""
    shards = 1 + (beside == "shards")
    options["updates"] = beside == "updates"
    for model in models:
        wanted: dict[int, Result] = {}
        for number, name in enumerate(names):
            try:
                schedule = library(name, workers // shards)
                if shards > 1:
                    schedule = schedules.sharded(schedule, shards)
            except fxsched.PlanError as error:
                yield name, model, f"refused: {error}"
                continue
            count = schedule.microbatches
            wanted.setdefault(count, eager(model, count))
            try:
                late = bool(number % 2)
                found, _ = trained(model, schedule, late=late, **options)
                if beside == "updates":  # which take the gradients
                    found.gradients = wanted[count].gradients
                assert_equal(found, wanted[count])
                yield name, model, "equal"
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                yield name, model, f"{type(error).__name__}: {error} ({where.name})"


def run_waits(name: str, workers: int) -> Iterator[tuple[int, int, str]]:
    """Each wait of a step left out: its worker, its number, and "caught", "implied" or
    "missed"."""
    schedule = library(name, workers)
    wanted, (wires,) = trained("linear", schedule, 1, late=True)
    for worker, waits in enumerate(wires.waits):
        for number in range(waits):
            left = {"left_out": (worker, number), "late": True}
            try:
                found, (wires,) = trained("linear", schedule, 1, **left)
                assert_equal(found, wanted)
                yield worker, number, "implied" if wires.implied else "missed"
            except AssertionError:
                yield worker, number, "caught"


def main() -> int:
    """Prints what became of each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    every = [name for name in LIBRARY if name not in STALE]
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=[*CASES], choices=CASES)
    parser.add_argument("--schedules", nargs="+", default=every, choices=every)
    parser.add_argument("--queues", type=int, help="hardware queues of a worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beside", choices=("shards", "updates"))
    parser.add_argument("--threads", action="store_true", help="without the device")
    parser.add_argument("--waits", action="store_true", help="leave out each wait")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    if given.waits:
        for name in given.schedules:
            for worker, number, verdict in run_waits(name, given.workers):
                counts[verdict] += 1
                if verdict == "missed":
                    print(f"{name}: wait {number} of worker {worker}")
    else:
        options = {"count": given.queues, "seed": given.seed, "threads": given.threads}
        which = given.schedules, given.models, given.workers, given.beside
        for name, model, verdict in run_library(*which, **options):
            word = verdict.partition(":")[0]
            counts[word] += 1
            if verdict != "equal":
                print(f"{name}, {model}: {verdict}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return int(not {"equal", "refused", "caught", "implied"}.issuperset(counts))


if __name__ == "__main__":
    sys.exit(main())
