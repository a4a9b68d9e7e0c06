"""Models of several parts, and what they do with autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .case import BATCH, Inputs, Zoo
from .net import WIDTH, Net, pair

AUTOGRAD = Zoo("features")


class Tower(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@AUTOGRAD()
def several_encoders() -> tuple[nn.Module, Inputs]:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = Tower(1), Tower(2), Tower(3)
            self.head = nn.Linear(3 * WIDTH, 1)

        def forward(self, a: Tensor, b: Tensor, c: Tensor, y: Tensor) -> Tensor:
            joined = torch.cat([self.a(a), self.b(b), self.c(c)], 1)
            return F.binary_cross_entropy_with_logits(self.head(joined).squeeze(1), y)

    rows = [torch.randn(BATCH, WIDTH) for _ in range(3)]
    return Three(), (*rows, torch.arange(BATCH) % 2.0)


@AUTOGRAD()
def siamese() -> tuple[nn.Module, Inputs]:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Tower(2)

        def forward(self, x: Tensor, near: Tensor, other: Tensor) -> Tensor:
            one, two, three = self.tower(x), self.tower(near), self.tower(other)
            return F.triplet_margin_loss(one, two, three)

    return Siamese(), tuple(torch.randn(BATCH, WIDTH) for _ in range(3))


@AUTOGRAD()
def two_heads() -> tuple[nn.Module, Inputs]:
    class Heads(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            body = self.one(x)
            return (self.two(body) - y).pow(2).mean() + body.abs().mean()

    return Heads(), pair()


@AUTOGRAD()
def mixture_of_experts() -> tuple[nn.Module, Inputs]:
    class Mixture(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(Tower(1) for _ in range(3))

        def hidden(self, x: Tensor) -> Tensor:
            weights = self.gate(x).softmax(-1)
            outs = torch.stack([expert(x) for expert in self.experts], -1)
            return (outs * weights.unsqueeze(1)).sum(-1)

    return Mixture(), pair()


@AUTOGRAD()
def autoencoder() -> tuple[nn.Module, Inputs]:
    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return F.mse_loss(self.up(F.relu(self.down(x))), x)

    return Auto(), pair()[:1]


@AUTOGRAD()
def long_skip() -> tuple[nn.Module, Inputs]:
    class Skip(Net):
        def hidden(self, x: Tensor) -> Tensor:
            kept = [x]
            for half in (self.one, self.two, self.one, self.two):
                kept.append(half(kept[-1]) + sum(kept))
            return torch.stack(kept).mean(0)

    return Skip(), pair()


@AUTOGRAD()
def checkpointed() -> tuple[nn.Module, Inputs]:
    class Checked(Net):
        def hidden(self, x: Tensor) -> Tensor:
            x = checkpoint(self.one, x, use_reentrant=False)
            return checkpoint(self.two, x, use_reentrant=False)

    return Checked(), pair()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x > -0.1) * 2


@AUTOGRAD()
def own_autograd_function() -> tuple[nn.Module, Inputs]:
    class Own(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return self.two(Doubled.apply(self.one(x)))

    return Own(), pair()


@AUTOGRAD()
def detached() -> tuple[nn.Module, Inputs]:
    class Detached(Net):
        def hidden(self, x: Tensor) -> Tensor:
            one = self.one(x)
            return self.two(one.detach()) + one

    return Detached(), pair()


@AUTOGRAD()
def no_grad_inside() -> tuple[nn.Module, Inputs]:
    class Inside(Net):
        def hidden(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.one(x)
            return self.two(x) - target

    return Inside(), pair()


@AUTOGRAD()
def straight_through() -> tuple[nn.Module, Inputs]:
    class Straight(Net):
        def hidden(self, x: Tensor) -> Tensor:
            one = self.one(x)
            return self.two(one + (one.round() - one).detach())

    return Straight(), pair()


@AUTOGRAD()
def reversed_gradient() -> tuple[nn.Module, Inputs]:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return -gradients[0]

    class Adversarial(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return self.two(Reverse.apply(self.one(x)))

    return Adversarial(), pair()


@AUTOGRAD()
def func_grad() -> tuple[nn.Module, Inputs]:
    class Energy(Net):
        def hidden(self, x: Tensor) -> Tensor:
            force = torch.func.grad(lambda z: self.two(z).pow(2).sum())(self.one(x))
            return force

    return Energy(), pair()


@AUTOGRAD()
def func_vmap() -> tuple[nn.Module, Inputs]:
    class Mapped(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return torch.func.vmap(lambda row: self.two(self.one(row)))(x)

    return Mapped(), pair()


@AUTOGRAD()
def func_jvp() -> tuple[nn.Module, Inputs]:
    class Tangent(Net):
        def hidden(self, x: Tensor) -> Tensor:
            value, tangent = torch.func.jvp(self.two, (self.one(x),), (x,))
            return value + tangent

    return Tangent(), pair()


@AUTOGRAD()
def gradient_inside() -> tuple[nn.Module, Inputs]:
    class Inside(Net):
        def hidden(self, x: Tensor) -> Tensor:
            x = self.one(x).detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.two(x).sum(), x, create_graph=True)
            return slope

    return Inside(), pair()


@AUTOGRAD()
def functional_call() -> tuple[nn.Module, Inputs]:
    class Called(Net):
        def hidden(self, x: Tensor) -> Tensor:
            doubled = {n: p * 2 for n, p in self.two.named_parameters()}
            return torch.func.functional_call(self.two, doubled, (self.one(x),))

    return Called(), pair()


@AUTOGRAD()
def forward_hooks() -> tuple[nn.Module, Inputs]:
    net = Net()
    net.one.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    net.two.register_forward_hook(lambda module, given, out: out + 1)
    return net, pair()
