"""The update of a stale optimizer on a quadratic, as a matrix.

The loss is lambda w^2 / 2, so a gradient on the weights of k updates ago is
lambda w[t-k]. Everything is linear: an update multiplies the state

    (w[t], w[t-1], .., w[t-k], e[t])

by a matrix, in which e is the one number that an optimizer keeps beside the weights.
Its spectral radius is the factor by which the error changes with each update in the
long run: below 1 training converges. Of the eigenvalues of a quadratic in many
dimensions each has such a matrix of its own, so lr and lambda matter as lr * lambda
alone. The analysis is that of Idle Speculations on Pipeline Parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CORRECTION = 0.135  # PipeMare's D, about e^-2


@dataclass(frozen=True)
class Method:
    """An optimizer and how stale its gradients are.

    forward, backward: updates between the weights that F (B) reads and the newest.
    beta: of momentum. nesterov: torch.optim.SGD's nesterov.
    sensitivity, correction, exponent: as pipemare has them below.
    """

    forward: int
    backward: int
    beta: float = 0.0
    nesterov: bool = False
    sensitivity: float = 0.0
    correction: float | None = None
    exponent: float = 0.0


def update_matrices(method: Method, lr_lambda: torch.Tensor) -> torch.Tensor:
    """What an update multiplies the state by, (n, forward + 2, forward + 2) for n
    values of lr * lambda."""
    rate = lr_lambda / max(method.forward, 1) ** method.exponent
    constant, slope = _momentum(method) if method.beta else _pipemare(method)
    matrices: torch.Tensor = constant + rate[:, None, None] * slope
    return matrices


def spectral_radius(method: Method, lr_lambda: torch.Tensor) -> torch.Tensor:
    """The largest absolute eigenvalue, for each of n values of lr * lambda."""
    matrices = update_matrices(method, lr_lambda.double())
    radius: torch.Tensor = torch.linalg.eigvals(matrices).abs().amax(-1)
    return radius


def _shift(method: Method) -> torch.Tensor:
    """w[t+1] = w[t], and each older weight is what the next newer one was."""
    weights = method.forward + 1
    matrix = torch.zeros(weights + 1, weights + 1, dtype=torch.float64)
    matrix[0, 0] = 1
    for age in range(1, weights):
        matrix[age, age - 1] = 1
    return matrix


def _momentum(method: Method) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.optim.SGD, e in units of lambda:

    momentum:  e[t+1] = beta e[t] + w[t-k],  w[t+1] = w[t] - lr lambda e[t+1]
    nesterov:  the same e,  w[t+1] = w[t] - lr lambda (w[t-k] + beta e[t+1])
    """
    beta, oldest = method.beta, method.forward
    constant = _shift(method)
    constant[-1, -1] = beta
    constant[-1, oldest] += 1
    slope = torch.zeros_like(constant)
    factor = beta if method.nesterov else 1.0
    slope[0] = -factor * constant[-1]
    slope[0, oldest] -= float(method.nesterov)
    return constant, slope


def _pipemare(method: Method) -> tuple[torch.Tensor, torch.Tensor]:
    """PipeMare (Yang et al. 2019); SGD where sensitivity is 0.

    A gradient whose F read u and whose B read v is lambda ((1 + s) u - s v): s is the
    sensitivity, the paper's Delta / lambda. With f = forward and b = backward:

        u = w[t-f],  v = w[t-b] - (f - b) e[t]                  T2, correction D
        e[t+1] = gamma e[t] + (1 - gamma) (w[t+1] - w[t]),  gamma = D^(1 / (f - b))
        lr = base / f^p                                         T1, exponent p

    p goes from 1 to 0 as training goes on: 1 - min(update / annealed updates, 1).

    To first order in z - 1, where z is the slow root, u and v are alike for any D: the
    velocity is (z - 1) / z times w. To second order too if gamma = 1 - 2 / (f - b + 1),
    whose D goes to e^-2 as f - b grows.
    """
    lag = method.forward - method.backward
    constant = _shift(method)
    slope = torch.zeros_like(constant)
    slope[0, method.forward] -= 1 + method.sensitivity
    slope[0, method.backward] += method.sensitivity
    if method.correction is None or not lag:
        return constant, slope
    gamma = method.correction ** (1 / lag)
    slope[0, -1] = -method.sensitivity * lag
    slope[-1] = (1 - gamma) * slope[0]  # w[t+1] - w[t] has no part without lr
    constant[-1, -1] = gamma
    return constant, slope
