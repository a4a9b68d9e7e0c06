"""Parameters that are tied, frozen, shared, computed of others, or hard to find."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from .case import BATCH, PIPELINES, Inputs, Zoo
from .net import WIDTH, Net, pair

PARAMETERS = Zoo("features")


@PARAMETERS()
def tied() -> tuple[nn.Module, Inputs]:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.middle = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, 30, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            scores = self.head(torch.tanh(self.middle(self.table(ids[:, :-1]))))
            return F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())

    return Tied(), (torch.randint(0, 30, (BATCH, 8)),)


@PARAMETERS()
def shared_module() -> tuple[nn.Module, Inputs]:
    net = Net()
    net.two = net.one
    return net, pair()


@PARAMETERS()
def frozen_part() -> tuple[nn.Module, Inputs]:
    net = Net()
    net.one.requires_grad_(False)
    return net, pair()


@PARAMETERS()
def frozen_end() -> tuple[nn.Module, Inputs]:
    net = Net()
    net.two.requires_grad_(False)
    return net, pair()


@PARAMETERS()
def low_rank_adapters() -> tuple[nn.Module, Inputs]:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Linear(base.in_features, 2, bias=False)
            self.up = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x) + self.up(self.down(x))
            return out

    net = Net()
    for half in (net.one, net.two):
        half[0], half[2] = Adapted(half[0]), Adapted(half[2])
    return net, pair()


@PARAMETERS()
def unused_parameter() -> tuple[nn.Module, Inputs]:
    net = Net()
    net.never = nn.Linear(3, 3)
    return net, pair()


@PARAMETERS()
def bare_parameters() -> tuple[nn.Module, Inputs]:
    class Bare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.list = nn.ParameterList(torch.randn(WIDTH) for _ in range(2))
            self.dict = nn.ParameterDict({"a": torch.randn(()), "b": torch.ones(1)})

        def hidden(self, x: Tensor) -> Tensor:
            x = self.one(x) * self.scale + self.list[0]
            return self.two(x * self.dict["a"]) * self.dict["b"] + self.list[1]

    return Bare(), pair()


@PARAMETERS()
def parameter_used_twice() -> tuple[nn.Module, Inputs]:
    class Twice(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return self.two(self.one(self.two(self.one(x))))

    return Twice(), pair()


@PARAMETERS()
def weight_norm() -> tuple[nn.Module, Inputs]:
    net = Net()
    parametrizations.weight_norm(net.one[0])
    return net, pair()


@PARAMETERS()
def weight_norm_by_hook() -> tuple[nn.Module, Inputs]:
    net = Net()
    torch.nn.utils.weight_norm(net.one[0])
    return net, pair()


@PARAMETERS(schedules=PIPELINES, apart=False)
def spectral_norm() -> tuple[nn.Module, Inputs]:
    net = Net()
    parametrizations.spectral_norm(net.one[0])
    return net, pair()


@PARAMETERS(schedules=PIPELINES, apart=False)
def spectral_norm_by_hook() -> tuple[nn.Module, Inputs]:
    net = Net()
    torch.nn.utils.spectral_norm(net.one[0])
    return net, pair()


@PARAMETERS()
def orthogonal() -> tuple[nn.Module, Inputs]:
    net = Net()
    parametrizations.orthogonal(net.two[0], orthogonal_map="cayley")
    return net, pair()


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@PARAMETERS()
def own_parametrization() -> tuple[nn.Module, Inputs]:
    class Square(Net):
        def __init__(self) -> None:
            super().__init__()
            self.middle = nn.Linear(WIDTH, WIDTH)
            parametrize.register_parametrization(self.middle, "weight", Symmetric())

        def hidden(self, x: Tensor) -> Tensor:
            return self.two(self.middle(self.one(x)))

    return Square(), pair()


@PARAMETERS()
def pruned() -> tuple[nn.Module, Inputs]:
    from torch.nn.utils import prune

    net = Net()
    prune.l1_unstructured(net.one[0], "weight", 0.5)
    return net, pair()


@PARAMETERS()
def low_precision_part() -> tuple[nn.Module, Inputs]:
    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.one.double()

        def hidden(self, x: Tensor) -> Tensor:
            return self.two(self.one(x.double()).float())

    return Mixed(), pair()


@PARAMETERS()
def double_precision() -> tuple[nn.Module, Inputs]:
    x, y = pair()
    return Net().double(), (x.double(), y.double())


@PARAMETERS()
def parameter_called_self() -> tuple[nn.Module, Inputs]:
    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("self", nn.Parameter(torch.ones(WIDTH)))
            self.register_parameter("input", nn.Parameter(torch.ones(WIDTH)))

        def hidden(self, x: Tensor) -> Tensor:
            scale = self.get_parameter("self") * self.get_parameter("input")
            return self.two(self.one(x) * scale)

    return Odd(), pair()


@PARAMETERS()
def modules_in_a_list() -> tuple[nn.Module, Inputs]:
    class Listed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
            for i, each in enumerate(self.parts):
                self.add_module(f"part_{i}", each)

        def hidden(self, x: Tensor) -> Tensor:
            for each in self.parts:
                x = torch.tanh(each(x))
            return self.two(self.one(x))

    return Listed(), pair()


@PARAMETERS()
def attribute_set_in_forward() -> tuple[nn.Module, Inputs]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.width = x.shape[1]
            return torch.tanh(self.linear(x)) * self.width

    class Setting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())

        def hidden(self, x: Tensor) -> Tensor:
            return self.two(self.blocks(self.one(x)))

    return Setting(), pair()


@PARAMETERS()
def getattr_overridden() -> tuple[nn.Module, Inputs]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__("linear" if name == "alias" else name)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.alias(x))

    net = Net()
    net.one = nn.Sequential(Block(), Block())
    return net, pair()
