"""Values that are indexed and written, loops, branches and modes."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import BATCH, PIPELINES, Inputs, Zoo
from .net import WIDTH, Net, pair

CONTROL = Zoo("features")


@CONTROL()
def index_and_scatter() -> tuple[nn.Module, Inputs]:
    class Scatter(Net):
        def hidden(self, x: Tensor) -> Tensor:
            x = self.one(x)
            order = x.argsort(1)
            out = torch.zeros_like(x).scatter_add(1, order, x)
            top, _ = out.topk(4, dim=1)
            return self.two(torch.cat([top.gather(1, order[:, :4] % 4), out[:, 4:]], 1))

    return Scatter(), pair()


@CONTROL()
def slices_written() -> tuple[nn.Module, Inputs]:
    class Written(Net):
        def hidden(self, x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            out[:, ::2] = self.one(x)[:, ::2]
            out[:, 1::2] += x[:, :8]
            return self.two(out)

    return Written(), pair()


@CONTROL()
def heads_masked_in_place() -> tuple[nn.Module, Inputs]:
    class Masked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.three, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.register_buffer("mask", torch.rand(4, 5, 5) > 0.7)

        def hidden(self, x: Tensor) -> Tensor:
            q, k, v = self.three(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-2, -1)
            scores.masked_fill_(self.mask, -9.0)
            own = scores.softmax(-1) @ v
            return self.two(x + self.out(own.transpose(1, 2).flatten(2)))

    return Masked(), pair(5, WIDTH)


@CONTROL()
def added_in_place() -> tuple[nn.Module, Inputs]:
    class Added(Net):
        def hidden(self, x: Tensor) -> Tensor:
            one = self.one(x)
            before = one * 2
            one += x
            after = one.view(-1, 4, 4).transpose(1, 2)
            two = self.two(nn.functional.silu(one.clone(), inplace=True))
            out = two.mul_(0.5).sub_(before) + after.flatten(1)
            with torch.no_grad():
                out += 1
            return out

    return Added(), pair()


@CONTROL(schedules=PIPELINES, apart=False)
def centred_over_the_batch() -> tuple[nn.Module, Inputs]:
    class Centred(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 32)

        def hidden(self, x: Tensor) -> Tensor:
            gate = self.gate(x)
            return self.one[2](self.one[:2](x) * (gate - gate.mean(0)))

    return Centred(), pair()


@CONTROL()
def scaled_dot_product() -> tuple[nn.Module, Inputs]:
    class Attention(Net):
        def hidden(self, x: Tensor) -> Tensor:
            q, k, v = (
                f(x).unflatten(-1, (2, -1)).transpose(1, 2)
                for f in (self.one, self.two, self.one)
            )
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.transpose(1, 2).flatten(2)

    return Attention(), pair(4, WIDTH)


@CONTROL()
def loop_over_time() -> tuple[nn.Module, Inputs]:
    class Loop(Net):
        def hidden(self, x: Tensor) -> Tensor:
            state = torch.zeros_like(x[:, 0])
            for step in x.unbind(1):
                state = torch.tanh(self.one(state) + self.two(step))
            return state.unsqueeze(1)

    return Loop(), pair(5, WIDTH)


@CONTROL()
def python_branch() -> tuple[nn.Module, Inputs]:
    class Branch(Net):
        def hidden(self, x: Tensor) -> Tensor:
            if self.training and x.shape[-1] == WIDTH:
                x = self.one(x)
            return self.two(x)

    return Branch(), pair()


@CONTROL(apart=False)
def branch_on_data() -> tuple[nn.Module, Inputs]:
    class Branch(Net):
        def hidden(self, x: Tensor) -> Tensor:
            x = self.one(x)
            if x.sum() > 0:
                x = x * 2
            return self.two(x)

    return Branch(), pair()


@CONTROL(apart=False)
def cond() -> tuple[nn.Module, Inputs]:
    class Cond(Net):
        def hidden(self, x: Tensor) -> Tensor:
            x = self.one(x)
            x = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))
            return self.two(x)

    return Cond(), pair()


@CONTROL()
def evaluation_mode() -> tuple[nn.Module, Inputs]:
    net = Net()
    net.one.insert(1, nn.BatchNorm1d(32))
    net.two.insert(1, nn.Dropout(0.5))
    return net.eval(), pair()


@CONTROL()
def sequential_of_names() -> tuple[nn.Module, Inputs]:
    layers = OrderedDict(
        first=nn.Linear(WIDTH, 32), act=nn.SiLU(), last=nn.Linear(32, WIDTH)
    )
    return nn.Sequential(layers), pair()[:1]


@CONTROL(apart=False)
def contrastive() -> tuple[nn.Module, Inputs]:
    class Contrast(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            scores = F.normalize(self.one(x)) @ F.normalize(self.two(y)).T
            return F.cross_entropy(scores * 5, torch.arange(x.shape[0]))

    return Contrast(), pair()


@CONTROL(options={"batch_dims": {"x": 1, "y": 1}})
def sequence_first() -> tuple[nn.Module, Inputs]:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.layer(x) - y).pow(2).mean()

    x, y = (torch.randn(5, BATCH, WIDTH) for _ in range(2))
    return First(), {"x": x, "y": y}


@CONTROL()
def buffer_for_positions() -> tuple[nn.Module, Inputs]:
    class Positions(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ids", torch.arange(12).unsqueeze(0))
            self.table = nn.Embedding(12, WIDTH)

        def hidden(self, x: Tensor) -> Tensor:
            return self.two(self.one(x) + self.table(self.ids[:, : x.shape[1]]))

    return Positions(), pair(5, WIDTH)
