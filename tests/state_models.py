"""Small models that keep state which forward reads and writes, by kind.

Each is called as model(x, y, i): 8 rows of 8 numbers, labels below 4 and numbers of
samples below 16; it returns a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH, CLASSES, SAMPLES = 8, 8, 4, 16


class Kept(nn.Module):
    """Two layers; `use` computes the loss and writes into the model."""

    def __init__(self, use: Callable[..., Tensor], **state: Tensor) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.use = use
        for name, value in state.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor, y: Tensor, i: Tensor) -> Any:
        return self.use(self, self.b(torch.tanh(self.a(x))), x, y, i)


def centre(s: Any, z: Tensor, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    loss = (torch.softmax(x - s.m, -1) * z.log_softmax(-1)).sum(-1).mean()
    s.m = s.m * 0.9 + x.mean(0, keepdim=True) * 0.1
    return loss


def centre_first(s: Any, z: Tensor, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    with torch.no_grad():
        s.m.mul_(0.9).add_(z.mean(0), alpha=0.1)
    return (z - s.m).pow(2).mean()


def unread(s: Any, z: Tensor, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    with torch.no_grad():
        s.m.lerp_(z.mean(0), 0.1)
    return F.cross_entropy(z, y, ignore_index=0)


def summed(s: Any, z: Tensor, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    s.m.mul_(0.9).add_(z.detach().sum(0), alpha=0.01)
    return F.cross_entropy(z, y, ignore_index=0)


def queue(s: Any, z: Tensor, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    k = F.normalize(x, dim=1)
    logits = torch.cat([(z * k).sum(1, keepdim=True), z @ s.q.clone()], 1)
    with torch.no_grad():
        at = (s.at + torch.arange(len(x))) % s.q.shape[1]
        s.q.index_copy_(1, at, k.T)
        s.at[0] = (s.at[0] + len(x)) % s.q.shape[1]
    return F.cross_entropy(logits, torch.zeros_like(y))


def enqueue_first(s: Any, z: Tensor, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    with torch.no_grad():
        s.q[:, : len(x)] = x.T
    return (z @ s.q).logsumexp(1).mean()


def codebook(s: Any, z: Tensor, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    with torch.no_grad():
        hot = F.one_hot(torch.cdist(z, s.book).argmin(1), len(s.book)).to(z.dtype)
        s.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        s.sums.mul_(0.9).add_(hot.T @ z, alpha=0.1)
        s.book.copy_(s.sums / (s.sizes + 0.1)[:, None])
    quantised = hot @ s.book
    return (z - quantised).pow(2).mean() + (z + (quantised - z).detach()).abs().mean()


def bank(s: Any, z: Tensor, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    old = s.bank[i]
    with torch.no_grad():
        s.bank.index_copy_(0, i, F.normalize(0.5 * old + 0.5 * z, dim=1))
    return (z - old).pow(2).mean() + F.cross_entropy(z @ s.bank.T, i)


def balance(s: Any, z: Tensor, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    top = (z + s.bias).topk(2, 1).indices
    hot = F.one_hot(top, WIDTH).sum(1).to(z.dtype)
    with torch.no_grad():
        load = hot.sum(0)
        s.bias.add_(torch.sign(load.mean() - load), alpha=0.01)
        s.load.add_(load)
    return (z * hot).pow(2).mean()


def observer(s: Any, z: Tensor, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    with torch.no_grad():
        s.low.copy_(torch.minimum(s.low, z.min()))
        s.high.copy_(torch.maximum(s.high, z.max()))
    step = (s.high - s.low) / 15
    return (z + ((z / step).round() * step - z).detach()).pow(2).mean()


def centres(s: Any, z: Tensor, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    with torch.no_grad():
        count = F.one_hot(y, CLASSES).sum(0)
        apart = torch.zeros_like(s.c).index_add_(0, y, s.c[y] - z)
        s.c.sub_(0.5 * apart / (1 + count)[:, None])
    return (z - s.c[y]).pow(2).mean()


def through(s: Any, z: Tensor, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    new = 0.9 * s.m + 0.1 * z.mean(0)
    loss = (z - new).pow(2).mean()
    s.m.copy_(new.detach())
    return loss


def through_new(s: Any, z: Tensor, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    new = (0.9 * s.m + 0.1 * z.mean(0)).relu()
    s.m = new.detach()
    return ((z - new) * s.m.exp()).pow(2).mean()


def counters(s: Any, z: Tensor, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    s.n += 1
    s.rows.add_(len(x))
    s.each += len(x)
    warm = torch.clamp(s.n / 10, max=1)
    return (z * warm).pow(2).mean() + 0 * s.rows


def read_between(s: Any, z: Tensor, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    row = s.q[0]
    with torch.no_grad():
        s.q.mul_(0.5)
        first = (z * row).sum(1)
        row.add_(z.mean(0))
        second = (z * s.q[0]).sum(1)
        s.q.add_(second.max())
    return (first * second).mean() + (z * row).mean()


def ema(s: Any, z: Tensor, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    with torch.no_grad():
        for p, q in zip(s.b.parameters(), s.target.parameters(), strict=True):
            q.mul_(0.9).add_(p, alpha=0.1)
        t = s.target(x)
    return (z - t).pow(2).mean()


def _ema() -> nn.Module:
    model = Kept(ema)
    model.target = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    return model


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.layers = nn.Sequential(norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        return self.layers(x).pow(2).mean()


class Instances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv1d(1, 4, 3)
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

    def forward(self, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        return self.norm(self.a(x[:, None])).pow(3).mean()


STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "centre": lambda: Kept(centre, m=zeros(1, WIDTH)),
    "centre_first": lambda: Kept(centre_first, m=zeros(WIDTH)),
    "unread": lambda: Kept(unread, m=zeros(WIDTH)),
    "summed": lambda: Kept(summed, m=zeros(WIDTH)),
    "queue": lambda: Kept(
        queue,
        q=F.normalize(torch.randn(WIDTH, SAMPLES), dim=0),
        at=torch.zeros(1, dtype=torch.long),
    ),
    "enqueue_first": lambda: Kept(enqueue_first, q=torch.randn(WIDTH, SAMPLES)),
    "codebook": lambda: Kept(
        codebook, book=torch.randn(5, WIDTH), sizes=zeros(5), sums=zeros(5, WIDTH)
    ),
    "bank": lambda: Kept(bank, bank=torch.randn(SAMPLES, WIDTH)),
    "balance": lambda: Kept(balance, bias=zeros(WIDTH), load=zeros(WIDTH)),
    "observer": lambda: Kept(observer, low=torch.zeros(()), high=torch.zeros(())),
    "centres": lambda: Kept(centres, c=torch.randn(CLASSES, WIDTH)),
    "through": lambda: Kept(through, m=zeros(WIDTH)),
    "through_new": lambda: Kept(through_new, m=zeros(WIDTH)),
    "counters": lambda: Kept(
        counters,
        n=torch.zeros(()),
        rows=torch.zeros(()),
        each=torch.zeros(2, dtype=torch.long),
    ),
    "read_between": lambda: Kept(read_between, q=torch.randn(2, WIDTH)),
    "ema": _ema,
    "spectral": Spectral,
    "instances": Instances,
}


def batch() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(ROWS, WIDTH)
    return x, torch.randint(0, CLASSES, (ROWS,)), torch.randperm(SAMPLES)[:ROWS]
