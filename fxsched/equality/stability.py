"""Regions of stability: the largest lr * lambda, and the one that converges fastest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..jobs.job import PlanError
from .recurrence import CORRECTION, Method, spectral_radius

STALENESS = {"sgd": 0, "momentum": 0, "nesterov": 0, "stale_sgd": 1, "pipemare": 1}
LEAST, POINTS = 1e-6, 600  # of lr * lambda: where the search begins, points it tries
EQUAL = 1e-7  # radii that differ by less are one: momentum's least is a plateau


@dataclass(frozen=True)
class Stability:
    """How a method converges on a quadratic, by lr * lambda.

    lr * lambda is the learning rate times the curvature.

    bound: the largest stable lr * lambda; None if the whole range is stable.
    best: the lr * lambda with the smallest spectral radius. rate: that radius.
    lr_lambda, radius: the points of the curve.
    """

    method: str
    staleness: int
    bound: float | None
    best: float
    rate: float
    lr_lambda: tuple[float, ...]
    radius: tuple[float, ...]


def stability(
    method: str,
    staleness: int | None = None,
    *,
    beta: float = 0.9,
    backward: int = 0,
    sensitivity: float = 1.0,
    correction: float | None = CORRECTION,
    exponent: float = 0.0,
    upper: float = 4.0,
    lr_lambda: Sequence[float] | None = None,
) -> Stability:
    """Computes how training with stale gradients converges on the loss lambda w^2 / 2.

    On this loss, an update multiplies the weight and its older values by a matrix (Idle
    Speculations on Pipeline Parallelism). In the long run, each update multiplies the
    distance to the minimum by the spectral radius of this matrix, its largest absolute
    eigenvalue. Training is stable if the radius is below 1.

    method: "sgd", "momentum" or "nesterov" (as in torch.optim.SGD), "stale_sgd" (sgd
        with a staleness of 1 by default) or "pipemare" (Yang et al. 2019).
    staleness: how many updates there are between the weights at which a gradient is
        computed and the weights to which it is applied. For pipemare: how many there
        are between the weights that F reads and the newest (tau_fwd).
    beta: the momentum factor, for momentum and nesterov.
    backward: for pipemare, the same for the weights that B reads (tau_bkwd).
    sensitivity: for pipemare, how much a gradient changes with the difference between
        the weights of F and B, in units of lambda (Delta / lambda).
    correction: for pipemare, D of the discrepancy correction, from 0 to 1. Each update
        multiplies the velocity by D^(1 / (staleness - backward)). None: no correction.
    exponent: for pipemare, p of the learning rate lr / staleness^p. PipeMare begins
        training with p = 1 and lowers p to 0. lr_lambda is that of lr itself.
    upper: the end of the range of lr * lambda, which begins at 0.
    lr_lambda: the points of the curve; by default 400 points in the range.
    """
    if method not in STALENESS:
        raise PlanError(f"method {method!r}: give one of {', '.join(STALENESS)}")
    forward = STALENESS[method] if staleness is None else staleness
    if forward < 0 or not 0 < upper < math.inf:
        raise PlanError(
            f"staleness {forward} and upper {upper:g}: give a staleness of 0 or more, "
            "and an upper above 0"
        )
    if method == "pipemare":
        _check(forward, backward, correction)
        update = Method(
            forward, backward, 0.0, False, sensitivity, correction, exponent
        )
    else:
        update = Method(forward, forward, _beta(method, beta), method == "nesterov")
    bound = _bound(update, upper)
    best, rate = _fastest(update, bound or upper)
    points = [upper * i / 400 for i in range(401)] if lr_lambda is None else lr_lambda
    radius = spectral_radius(update, torch.tensor(points, dtype=torch.float64))
    curve = tuple(map(float, points)), tuple(radius.tolist())
    return Stability(method, forward, bound, best, rate, *curve)


def _check(forward: int, backward: int, correction: float | None) -> None:
    if not 0 <= backward <= forward:
        raise PlanError(
            f"backward is {backward}, but B's weights are 0 to {forward} updates old: "
            "give one no older than F's"
        )
    if correction is not None and not 0 <= correction < 1:
        raise PlanError(f"correction is {correction:g}; give 0 or more, below 1")


def _beta(method: str, beta: float) -> float:
    if not 0 <= beta < 1:
        raise PlanError(f"beta is {beta:g}; give 0 or more, below 1")
    return beta if method in ("momentum", "nesterov") else 0.0


def _bound(update: Method, upper: float) -> float | None:
    """Where the radius first reaches 1: bisection where a grid shows it."""
    grid = torch.logspace(
        math.log10(LEAST * upper), math.log10(upper), POINTS, dtype=torch.float64
    )
    unstable = (spectral_radius(update, grid) >= 1).nonzero()
    if not len(unstable):
        return None
    first = int(unstable[0])
    low, high = float(grid[first - 1]) if first else 0.0, float(grid[first])
    for _ in range(50):
        middle = (low + high) / 2
        radius = spectral_radius(update, torch.tensor([middle], dtype=torch.float64))
        low, high = (middle, high) if float(radius) < 1 else (low, middle)
    return low


def _fastest(update: Method, bound: float) -> tuple[float, float]:
    """The least radius up to bound, where lr * lambda is least of those that have it:
    a grid, and finer ones around its least.
    """
    low, high = 0.0, bound
    for _ in range(8):
        grid = torch.linspace(low, high, POINTS, dtype=torch.float64)
        radius = spectral_radius(update, grid)
        least = int((radius <= radius.min() + EQUAL).nonzero()[0])
        low = float(grid[max(least - 2, 0)])
        high = float(grid[min(least + 2, POINTS - 1)])
    return float(grid[least]), float(radius[least])
