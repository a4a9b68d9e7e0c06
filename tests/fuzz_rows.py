"""Random models whose rows meet at random places: python -m tests.fuzz_rows 100 [SEED].

Each equals eager on the whole batch, loss and gradients, or is refused with a line;
the same operations over other dimensions stay in microbatches.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, Schedule, schedules

MICROBATCHES = 4
Op = Callable[[Tensor, int], Tensor]

# of x [batch, length, width], along a dimension
MIXING: dict[str, Op] = {
    "softmax": lambda x, d: x + torch.softmax(x, d),
    "normalisation": lambda x, d: (x - x.mean(d, True)) / (x.std(d, keepdim=True) + 1),
    "sort": lambda x, d: x.sort(d).values,
    "cumsum": lambda x, d: torch.cumsum(x, d) / 8,
    "product": lambda x, d: _pairs(x.transpose(0, d)).transpose(0, d),
    "mean": lambda x, d: x - x.mean(d, keepdim=True),
    "largest": lambda x, d: x - x.max(d, keepdim=True).values,
    "norm": lambda x, d: F.normalize(x, dim=d),
    "flip": lambda x, d: x + x.flip(d) / 2,
    "roll": lambda x, d: x.roll(1, d),
    "first": lambda x, d: x * torch.sigmoid(x.narrow(d, 0, 1)),
    "logsumexp": lambda x, d: x - torch.logsumexp(x, d, keepdim=True) / 4,
    "topk": lambda x, d: x - x.topk(2, d).values.mean(d, keepdim=True),
    "var": lambda x, d: x * x.var(d, keepdim=True).rsqrt().clamp(max=2),
    "picked": lambda x, d: _picked(x.transpose(0, d)).transpose(0, d),
}


def _pairs(x: Tensor) -> Tensor:
    """Rows attend to each other, along dimension 0."""
    flat = x.flatten(1)
    return (torch.softmax(flat @ flat.T / 8, -1) @ flat).view_as(x)


def _picked(x: Tensor) -> Tensor:
    """What is of some rows along dimension 0, put back."""
    rows = torch.nonzero(x.detach().flatten(1).sum(1) > 0)[:, 0]
    return torch.index_put(x, (rows,), x[rows] * 2).tanh()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda h, y: ((h.mean(1) - y) ** 2).mean(),
    "sum": lambda h, y: ((h.mean(1) - y) ** 2).sum(),
    "pairs": lambda h, y: F.cross_entropy(
        h.mean(1) @ y.T, torch.arange(len(y), device=y.device)
    ),
    "masked": lambda h, y: (
        (((h.mean(1) - y) ** 2).mean(-1) * (y[:, 0] > 0)).sum() / (y[:, 0] > 0).sum()
    ),
    "root": lambda h, y: ((h.mean(1) - y) ** 2).mean().sqrt(),
    "weighed": lambda h, y: (
        (torch.sigmoid(h[:, 0, 0]) * (h.mean(1) - y).abs().mean(-1)).sum()
        / torch.sigmoid(h[:, 0, 0]).sum()
    ),
    "picked": lambda h, y: ((h.mean(1) - y)[y[:, 0] > 0] ** 2).mean(),
    "both": lambda h, y: h.pow(2).sum() / 100 + h.mean() + 1.0,
}


class Drawn(nn.Module):
    """Linear layers, with operations between them that may mix rows."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(draw.randint(2, 5)))
        self.ops = [
            (draw.choice(list(MIXING)), draw.choice((0, 0, 1, 2)))
            if draw.random() < 0.6
            else None
            for _ in self.layers
        ]
        self.residual = [draw.random() < 0.5 for _ in self.layers]
        self.loss = draw.choice(list(LOSSES))

    def __str__(self) -> str:
        return f"{self.ops}, {self.residual}, {self.loss}"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer, op, residual in zip(
            self.layers, self.ops, self.residual, strict=True
        ):
            h = torch.tanh(layer(x))
            if op is not None:
                h = MIXING[op[0]](h, op[1])
            x = x + h if residual else h
        return LOSSES[self.loss](x, y)


def schedule_of(seed: int) -> Schedule:
    """A schedule of the library's, each in turn."""
    count = MICROBATCHES
    return (
        schedules.ddp(2, count),
        schedules.graph(2, count),
        schedules.one_f_one_b(1, count),
        schedules.looped_bfs(2, count),
        schedules.fsdp(2, count),
    )[seed % 5]


class Refused(NamedTuple):
    """An error that names the line of the operation."""

    text: str


def differs(seed: int) -> str | Refused | None:
    """What is wrong with one model, or why it is refused; None if it equals eager."""
    torch.manual_seed(seed)
    model = Drawn(seed)
    eager, inputs = copy.deepcopy(model), (torch.randn(8, 3, 8), torch.randn(8, 8))
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = ("auto", "spread")[seed % 2]
        backend = fxsched.backend(schedule_of(seed), pairs=pairs)
        step = torch.compile(model, backend=backend)
        try:
            loss = step(*inputs)
        except PlanError as error:
            text = f"{model}: {error}"
            return Refused(text) if ".py:" in str(error) else text
    expected = eager(*inputs)
    loss.backward()
    expected.backward()
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    worst = max(float((p.grad - q.grad).abs().max()) for p, q in pairs)  # type: ignore[operator]
    scale = max(float(p.grad.abs().max()) for p in eager.parameters())  # type: ignore[union-attr]
    close = torch.allclose(loss, expected, rtol=1e-4, atol=1e-5)
    if close and worst <= 1e-4 * max(scale, 1.0):
        return None
    return f"{model}: {float(loss)} for {float(expected)}, gradients by {worst}"


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    ends = {seed: differs(seed) for seed in range(first, first + count)}
    refused = {seed: end.text for seed, end in ends.items() if isinstance(end, Refused)}
    wrong = {seed: end for seed, end in ends.items() if isinstance(end, str)}
    for seed, text in (refused | wrong).items():
        print(f"{seed}: {text}")
    equal = count - len(refused) - len(wrong)
    print(f"{equal} of {count} models equal eager, {len(refused)} are refused")
    sys.exit(bool(wrong))
