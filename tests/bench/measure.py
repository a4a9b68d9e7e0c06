"""Contestants of a benchmark: their steps in turn, and their gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxsched.params.record import pieces_of, record_of

TOLERANCE = 1e-5  # of gradients, as a share of the largest of its parameter
WARM = 2  # rounds
RARELY = 4  # rounds between steps of what is measured less often
Batch = tuple[Tensor, Tensor, Tensor]


@dataclass
class Contestant:
    name: str
    model: nn.Module
    step: Callable[[], None]  # leaves gradients on the parameters of this rank
    split: str = ""
    error: float = 0.0  # the largest of its gradients, as a share of the parameter's
    every: int = 1  # so many rounds it takes a step


def slowest(values: Sequence[float]) -> Tensor:
    """Each value on the rank where it is largest."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def measure(contestants: Sequence[Contestant], rounds: int) -> dict[int, list[float]]:
    """Seconds of each step of each contestant (by id), in turn after WARM rounds."""
    taken: dict[int, list[float]] = {}
    for number in range(-WARM, rounds):
        for each in contestants:
            if number % each.every:
                continue
            clear(each.model)
            dist.barrier()
            start = time.perf_counter()
            each.step()
            if number >= 0:
                taken.setdefault(id(each), []).append(time.perf_counter() - start)
            clear(each.model)  # its memory may serve the next
    return {key: slowest(seconds).tolist() for key, seconds in taken.items()}


def check(
    contestant: Contestant, wanted: dict[str, Tensor], tolerance: float = TOLERANCE
) -> None:
    """Ends every rank unless, between them, they have all of eager's gradients."""
    clear(contestant.model)
    contestant.step()
    largest = max(float(g.abs().max()) for g in wanted.values())
    errors: dict[str, float] = {}
    for name, parameter in contestant.model.named_parameters():
        if parameter.grad is not None:
            # the gradient of a key's bias is nothing but rounding: hence a least scale
            scale = max(float(wanted[name].abs().max()), largest / 1000)
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            parts = pieces_of(parameter, gradient)
            own = record_of(parameter).parts
            whole = own.cut.of(wanted[name]) if own else None
            for number, part in parts.items():
                difference = part - (whole[number] if whole else wanted[name])
                most = float(difference.abs().max().nan_to_num(torch.inf))
                errors[name] = max(errors.get(name, 0.0), most / scale)
    everyone: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, errors)
    missing = set(wanted) - {name for each in everyone for name in each}
    if missing:
        fail(
            f"{contestant.name}: no rank has a gradient of {', '.join(sorted(missing))}"
        )
    contestant.error, name = max((e, n) for each in everyone for n, e in each.items())
    if contestant.error > tolerance:
        fail(
            f"{contestant.name}: the gradient of {name} is off eager's by "
            f"{contestant.error:.1e} of its largest entry; {tolerance} is allowed"
        )


def fail(message: str) -> NoReturn:
    """Every rank comes here; the first one says why."""
    raise SystemExit(1 if dist.get_rank() else message)
