"""Losses over a batch in which rows meet, or don't, by every operation that people
use: python -m tests.losses [NAME ...].

Each equals eager on the whole batch, loss and gradients, with its pairs joint and
spread, or is refused with a line. The last column says whether a stage runs on all rows
at once.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, schedules

WIDTH = 4
LSTM = nn.LSTM(WIDTH, WIDTH, batch_first=True)
GRU = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
CELL = nn.LSTMCell(WIDTH, WIDTH)


def picked_and_put_back(h: Tensor) -> Tensor:
    """A mixture of two experts, h [batch, WIDTH]."""
    out = torch.zeros_like(h)
    for chosen, scale in ((h[:, 0] > 0, 2.0), (h[:, 0] <= 0, 3.0)):
        rows = chosen.nonzero()[:, 0]
        out.index_add_(0, rows, (h[rows] * scale).tanh())
    return (out * h).pow(2).mean()


def written_between(h: Tensor) -> Tensor:
    """h [batch, WIDTH]."""
    out = h * 2
    out[h[:, 0] > 0] = h[h[:, 0] > 0].tanh()
    out.mul_(3)
    return out[h[:, 1] > 0].pow(2).mean() + out.mean()


def read_before(h: Tensor) -> Tensor:
    """h [batch, WIDTH]."""
    out = h * 2
    before = out.mean()
    out.add_(1)
    out[h[:, 0] > 0] = h[h[:, 0] > 0].tanh()
    return out.pow(2).mean() + before


def mean_written(h: Tensor) -> Tensor:
    """h [batch, WIDTH]."""
    out = torch.zeros(3)
    out[0] = h.mean()
    return out.sum().square() + h.square().mean()


def sum_written_over(h: Tensor) -> Tensor:
    """h [batch, WIDTH]."""
    out = h.sum(0)
    out[:2] = 1.5
    out[2:].copy_(h.mean(0)[2:])
    return out.exp().sum() + h.square().mean()


def rows_written(h: Tensor) -> Tensor:
    """h [batch, WIDTH]: rows that a microbatch need not have."""
    out = h.clone()
    out[3:5].mul_(0.5)
    out[2:4] += out.mean(0)
    half = torch.zeros_like(h)
    half[: len(h) // 2] = out[len(h) // 2 :]
    return (out + half).square().mean()


# of h [batch, WIDTH]
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum times size": lambda h: h.sum() * len(h),
    "sum over size": lambda h: h.sum() / len(h),
    "mean and sum": lambda h: h.square().mean() + h.cumsum(0).square().sum() / 16,
    "mean written": mean_written,
    "sum written over": sum_written_over,
    "rows written": rows_written,
    "masked mean": lambda h: torch.masked.mean(h).exp() + h.square().mean(),
    "mean and size": lambda h: h.mean() + len(h),
    "mean to the size": lambda h: h.mean().abs() ** len(h) * 1e3,
    "sum squared": lambda h: h.sum() ** 2,
    "pdist": lambda h: F.pdist(h).mean(),
    "bilinear": lambda h: F.bilinear(h, h, torch.ones(1, 4, 4)).mean(),
    "product of two orders": lambda h: (
        torch.cat([h, h.sin()]).T @ h.repeat_interleave(2, 0)
    ).mean(),
    "hardswish": lambda h: F.hardswish(h).mean(),
    "view across rows": lambda h: h.reshape(2, -1).softmax(0).pow(2).mean(),
    "view in groups": lambda h: (
        h.reshape(4, h.shape[0] // 4, 4).softmax(0).pow(2).mean()
    ),
    "windows of rows": lambda h: h.unfold(0, 2, 1).pow(2).mean(),
    "lstm": lambda h: LSTM(h[:, None].expand(-1, 3, -1))[0].pow(2).mean(),
    "lstm's last state": lambda h: (
        LSTM(h[:, None].expand(-1, 3, -1))[1][0].pow(2).mean()
    ),
    "lstm over rows, batch second": lambda h: (
        LSTM(h[None].expand(3, -1, -1))[0].pow(2).mean()
    ),
    "lstm over rows": lambda h: LSTM(h)[0].pow(2).mean(),
    "gru": lambda h: GRU(h[:, None].expand(-1, 3, -1))[0].pow(2).mean(),
    "lstm from a mean, expanded": lambda h: (
        LSTM(
            h[:, None].expand(-1, 3, -1),
            (h[None], h.mean(0)[None, None].expand(1, len(h), 4)),
        )[0]
        .pow(2)
        .mean()
    ),
    "gru over rows": lambda h: GRU(h[None].expand(3, -1, -1))[0].pow(2).mean(),
    "lstm cell": lambda h: CELL(h)[0].pow(2).mean(),
    "eigenvalues": lambda h: (
        torch.linalg.eigvals(h[:, :, None] * h[:, None] + torch.eye(4)).abs().mean()
    ),
    "expanded mean": lambda h: (h * h.mean(0)[None].expand(len(h), 4)).pow(2).mean(),
    "expanded mean, then a product": lambda h: (
        (h * h.pow(2).mean(0)[None].expand(len(h), 4) @ torch.ones(4, 4)).pow(2).mean()
    ),
    "expanded mean of a view": lambda h: (
        (h[None] * h.mean(0)[None, None].expand(1, len(h), 4)).pow(2).mean()
    ),
    "lstm from a mean": lambda h: (
        LSTM(
            h[:, None].expand(-1, 3, -1),
            (h[None], h.mean(0)[None, None].expand(1, len(h), 4)),
        )[0]
        .pow(2)
        .mean()
    ),
    "lstm from rows": lambda h: (
        LSTM(h[:, None].expand(-1, 3, -1), (h[None], h[None].exp()))[0].pow(2).mean()
    ),
    "mean for each pair": lambda h: (
        (h.mean().expand(len(h), len(h)) * h.sum()).pow(2).mean()
    ),
    "full": lambda h: (torch.full((len(h), 4), 2.0) * h).pow(2).mean(),
    "numbers by cumsum": lambda h: (h.new_ones(len(h), 4).cumsum(0) * h).pow(2).mean(),
    "eye": lambda h: (torch.eye(len(h)) @ h).pow(2).mean(),
    "gram times rows": lambda h: (h @ (h.t() @ h)).pow(2).mean(),
    "whitened": lambda h: (
        (h @ torch.linalg.inv(h.t() @ h + torch.eye(4))).pow(2).mean()
    ),
    "rows stacked with their mean": lambda h: (
        torch.stack([h, h.mean(0)[None].expand(len(h), 4)], 1).pow(2).mean()
    ),
    "rows and their mean, joined": lambda h: (
        torch.cat([h, h.mean(0)[None]], 0).pow(2).mean()
    ),
    "rows beside their mean": lambda h: (
        torch.cat([h, h.mean(0)[None].repeat(len(h), 1)], 1).pow(2).mean()
    ),
    "repeat": lambda h: (
        h.repeat(2, 1).pow(2).mean() + h.repeat_interleave(2, 0).sum() * 0.1
    ),
    "repeated rows, every second": lambda h: (
        h.repeat_interleave(2, 0)[::2] * h
    ).mean(),
    "rows picked by a mask": lambda h: h[h[:, 0] > 0].pow(2).mean(),
    "values picked by a mask": lambda h: h.masked_select(h > 0).pow(2).mean(),
    "rows picked by their numbers": lambda h: (
        h[torch.nonzero(h.detach()[:, 0] > 0)[:, 0]].pow(2).mean()
    ),
    "rows picked and put back": lambda h: (
        torch.zeros_like(h)
        .index_add(0, (h[:, 0] > 0).nonzero()[:, 0], h[h[:, 0] > 0].tanh())
        .pow(2)
        .mean()
    ),
    "rows picked and put back in place": picked_and_put_back,
    "rows put back and written between": written_between,
    "rows put back, read before": read_before,
    "columns picked by a mask": lambda h: h[:, h.detach()[0] > 0].pow(2).sum(),
    "rows as often as they say": lambda h: (
        h.repeat_interleave(1 + (h.detach()[:, 0] > 0).long(), 0).pow(2).mean()
    ),
    "where": lambda h: torch.where(h > h.mean(), h, h * 2).mean(),
    "topk": lambda h: h.topk(2, 0)[0].mean(),
    "chosen rows": lambda h: h[h.sum(1) > 0].sum() / 100,
    "attention pooling over rows": lambda h: (h.softmax(0) * h).sum(0).pow(2).mean(),
    "normalised over rows": lambda h: F.normalize(h, dim=0).sum(1).pow(2).mean(),
    "log of a mean": lambda h: torch.logsumexp(h, 0).mean() - h.mean(),
    "var": lambda h: h.var(0).mean() + (h.t() @ h / len(h)).pow(2).mean(),
    "vicreg's covariance": lambda h: (
        (((h - h.mean(0)).t() @ (h - h.mean(0))) / (len(h) - 1))
        .fill_diagonal_(0)
        .pow(2)
        .sum()
        / 4
    ),
    "barlow twins": lambda h: (
        (
            ((h - h.mean(0)) / h.std(0)).t() @ ((h - h.mean(0)) / h.std(0)) / len(h)
            - torch.eye(4)
        )
        .pow(2)
        .sum()
    ),
    "centred targets": lambda h: (
        -(((h - h.mean(0)).softmax(-1)).detach() * h.log_softmax(-1)).sum(-1).mean()
    ),
    "sinkhorn": lambda h: (
        (lambda q: q / q.sum(0, keepdim=True) / 4)(h.exp()).detach() * h.log_softmax(-1)
    ).sum(),
    "kernels of pairs": lambda h: torch.exp(-(torch.cdist(h, h.flip(0)) ** 2)).mean(),
    "focal": lambda h: (
        ((1 - h.sigmoid()) ** 2 * F.logsigmoid(h)).sum() / (h > 0).sum().clamp(min=1)
    ),
    "weighted by number": lambda h: (
        (h.sum(1) * torch.arange(len(h)).float()).sum()
        / torch.arange(len(h)).float().sum().clamp(min=1)
    ),
    "cdist": lambda h: torch.cdist(h, h).mean(),
    "ctc over rows": lambda h: F.ctc_loss(
        h.log_softmax(-1).unsqueeze(1).expand(-1, 2, -1),
        torch.ones(2, 2, dtype=torch.long),
        torch.tensor([len(h)] * 2),
        torch.tensor([2, 2]),
    ),
    "triangle": lambda h: h.t().tril().pow(2).mean(),
    "as_strided": lambda h: h.as_strided((len(h) // 2, 4), (8, 1)).pow(2).mean(),
    "scatter": lambda h: (
        torch.zeros(3, 4).index_add(0, torch.arange(len(h)) % 3, h).pow(2).mean()
    ),
    "segment": lambda h: (
        torch.segment_reduce(h, "sum", lengths=torch.tensor([len(h) // 2, len(h) // 2]))
        .pow(2)
        .mean()
    ),
    "covariance": lambda h: torch.cov(h.t()).sum(),
    "correlation": lambda h: torch.corrcoef(h.t()).sum(),
    "quantile": lambda h: h.quantile(0.5, 0).mean(),
    "singular values": lambda h: torch.linalg.svdvals(h).sum(),
    "lstsq": lambda h: torch.linalg.lstsq(h, torch.ones(len(h), 1)).solution.sum(),
    "pinv": lambda h: torch.linalg.pinv(h).sum(),
    "stft": lambda h: (
        torch.stft(h, 4, return_complex=True, window=torch.ones(4)).abs().mean()
    ),
    "put": lambda h: (
        torch.zeros(8).put(torch.arange(4), h.mean(0), accumulate=True).pow(2).mean()
    ),
    "trapezoid": lambda h: torch.trapezoid(h, dim=0).pow(2).mean(),
    "diff": lambda h: h.diff(dim=0).pow(2).mean(),
    "turned by 180 degrees": lambda h: (torch.rot90(h, 2) * h).mean(),
    "kron": lambda h: torch.kron(h, h).mean() + torch.kron(h, h).pow(2).mean(),
    "embedding bag": lambda h: (
        (F.embedding_bag(torch.arange(len(h)), h, torch.tensor([0, 2]))).pow(2).mean()
    ),
    "max pool over rows": lambda h: F.max_pool1d(h.t()[None], 2).pow(2).mean(),
    "lp pool over rows": lambda h: F.lp_pool1d(h.t()[None], 2, 2).pow(2).mean(),
    "mean pool over rows": lambda h: (
        F.avg_pool1d(h[None].transpose(1, 2), 2).pow(2).mean()
    ),
    "complex": lambda h: torch.complex(h, h).abs().mean(),
    "complex mean": lambda h: torch.complex(h, h).mean(0).abs().mean(),
}


class Rows(nn.Module):
    """Two layers and a loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.loss = LOSSES[name]

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, WIDTH] to a scalar."""
        return self.loss(self.second(self.first(x).relu()))


class Comparison(NamedTuple):
    """How far a loss is from eager's, or why it is refused."""

    name: str
    pairs: str
    far: float | None  # the largest difference, relative to max(1, eager's)
    refusal: str = ""
    joint: bool = False

    @property
    def equal(self) -> bool:
        """Whether it is equal, or refused."""
        return self.far is None or self.far < 1e-5


def values(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The loss and all gradients, flat."""
    model.zero_grad()
    loss = call(x)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([loss.detach().view(1), *(g.flatten() for g in gradients)])


def compare(name: str, pairs: str = "joint") -> Comparison:
    """A loss over 8 rows in 4 microbatches, beside eager's."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Rows(name), torch.randn(8, WIDTH)
    schedule = schedules.ddp(4) if pairs == "spread" else schedules.gpipe(2, 4)
    eager = values(model, model, x)
    backend = fxsched.backend(schedule, pairs=pairs)
    try:
        planned = values(model, torch.compile(model, backend=backend), x)
    except PlanError as error:
        return Comparison(name, pairs, None, str(error).splitlines()[0])
    far = ((eager - planned).abs() / eager.abs().clamp(min=1)).max().item()
    assert backend.plan is not None
    joint = any(data.get("joint") for _, data in backend.plan.stages.nodes(data=True))
    return Comparison(name, pairs, far, joint=joint)


def main() -> int:
    """Prints a row for each; 1 if any differs."""
    warnings.simplefilter("ignore")
    names = sys.argv[1:] or LOSSES
    rows = [compare(name, pairs) for name in names for pairs in ("joint", "spread")]
    headers = ["loss", "pairs", "difference", "refused", "all rows at once"]
    cells = [(r.name, r.pairs, r.far, r.refusal, "*" * r.joint) for r in rows]
    print(tabulate(cells, headers, maxcolwidths=[None, None, None, 50, None]))
    differ = [r for r in rows if not r.equal]
    print(
        f"{len(rows)} rows, {sum(r.far is None for r in rows)} refused, "
        f"{len(differ)} differ"
    )
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
