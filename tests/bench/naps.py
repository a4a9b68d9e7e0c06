"""An op that sleeps instead of computing, with a B that sleeps twice as long."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import fxsched

FLOPS_PER_SECOND = 50e9  # what a sleep counts as, far above all else
_late = {"F": 0.0, "B": 0.0}  # seconds that a call takes above what it sleeps


@torch.library.custom_op("bench::work", mutates_args=())
def work(x: Tensor, seconds: float, backward: float = 2.0) -> Tensor:
    """x, after so many seconds for each sample; its B takes `backward` times that."""
    sleep("F", seconds * len(x))
    return x.clone()


@torch.library.custom_op("bench::work_backward", mutates_args=())
def work_backward(gradient: Tensor, seconds: float) -> Tensor:
    """B of work."""
    sleep("B", seconds * len(gradient))
    return gradient.clone()


@torch.library.custom_op("bench::weigh", mutates_args=())
def weigh(weight: Tensor, seconds: float) -> Tensor:
    """weight, at once; its B, which is W, takes so many seconds."""
    return weight.clone()


@torch.library.custom_op("bench::weigh_backward", mutates_args=())
def weigh_backward(gradient: Tensor, seconds: float) -> Tensor:
    """B of weigh."""
    sleep("F", seconds)
    return gradient.clone()


fxsched.keeps_rows("bench::work")


def sleep(direction: str, seconds: float) -> None:
    """So that the call lasts as long; see calibrate."""
    seconds -= _late[direction]
    if seconds > 0:
        time.sleep(seconds)


@work.register_fake
def _(x: Tensor, seconds: float, backward: float = 2.0) -> Tensor:
    return torch.empty_like(x)


@work_backward.register_fake
def _(gradient: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(gradient)


@weigh.register_fake
@weigh_backward.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.seconds = inputs[1] * (inputs[2] if inputs[2:] else 1.0)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    gradient = torch.ops.bench.work_backward(gradient.contiguous(), ctx.seconds)
    return gradient, None, None


def _weigh_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return torch.ops.bench.weigh_backward(gradient.contiguous(), ctx.seconds), None


work.register_autograd(_backward, setup_context=_keep)
weigh.register_autograd(_weigh_backward, setup_context=_keep)


@register_flop_formula(torch.ops.bench.work)
def _(shape: Sequence[int], seconds: float, backward: float = 2.0, **_: Any) -> int:
    return int(FLOPS_PER_SECOND * seconds * shape[0])


@register_flop_formula(torch.ops.bench.work_backward)
def _(shape: Sequence[int], seconds: float, **_: Any) -> int:
    return int(FLOPS_PER_SECOND * seconds * shape[0])


@register_flop_formula(torch.ops.bench.weigh)
def _(shape: Sequence[int], seconds: float, **_: Any) -> int:
    return 0


@register_flop_formula(torch.ops.bench.weigh_backward)
def _(shape: Sequence[int], seconds: float, **_: Any) -> int:
    return int(FLOPS_PER_SECOND * seconds)


def nap(x: Tensor, seconds: float, backward: float = 2.0) -> Tensor:
    """x, after so many seconds for each sample; its B takes `backward` times that."""
    out: Tensor = torch.ops.bench.work(x, seconds, backward)
    return out


def calibrate(seconds: float = 0.01, calls: int = 30) -> dict[str, float]:
    """Makes calls last as long as they should: what they take to wake up and to go
    through the dispatcher is no longer slept. Gives those seconds of F and of B.

    They are the lower quartile: what other processes do to a call is no part of it.
    """
    _late.update(F=0.0, B=0.0)
    x = torch.zeros(1)
    for name, call, slept in (
        ("F", torch.ops.bench.work, seconds),
        ("B", torch.ops.bench.work_backward, seconds),
    ):
        taken = []
        for _ in range(calls):
            start = time.perf_counter()
            call(x, seconds)
            taken.append(time.perf_counter() - start)
        _late[name] = statistics.quantiles(taken)[0] - slept
    return dict(_late)
