"""Buffers, inputs and outputs of every kind that PyTorch lets a model have."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .case import PIPELINES, Inputs, Zoo
from .net import WIDTH, Net, pair

INTERFACES = Zoo("features")


@INTERFACES()
def buffer_read() -> tuple[nn.Module, Inputs]:
    class Fixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.randn(WIDTH))
            self.register_buffer("scratch", torch.ones(1), persistent=False)

        def hidden(self, x: Tensor) -> Tensor:
            return self.two(self.one(x - self.mean) * self.scratch)

    return Fixed(), pair()


class Counter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(WIDTH))


@INTERFACES(schedules=PIPELINES, apart=False)
def buffer_written_in_place() -> tuple[nn.Module, Inputs]:
    class InPlace(Counter):
        def hidden(self, x: Tensor) -> Tensor:
            x = self.one(x)
            self.calls.add_(1)
            self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return self.two(x)

    return InPlace(), pair()


@INTERFACES(schedules=PIPELINES, apart=False)
def buffer_reassigned() -> tuple[nn.Module, Inputs]:
    class Reassigned(Counter):
        def hidden(self, x: Tensor) -> Tensor:
            x = self.one(x)
            self.calls = self.calls + 1
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
            return self.two(x - self.average)

    return Reassigned(), pair()


@INTERFACES()
def bool_buffer() -> tuple[nn.Module, Inputs]:
    class Masked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.arange(WIDTH) % 2 == 0)

        def hidden(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).masked_fill(self.mask, 0.0))

    return Masked(), pair()


@INTERFACES()
def inputs_by_name() -> tuple[nn.Module, Inputs]:
    x, y = pair()
    return Net(), {"y": y, "x": x}


@INTERFACES()
def dict_input() -> tuple[nn.Module, Inputs]:
    class Dict(Net):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return (self.hidden(batch["x"]) - batch["y"]).pow(2).mean()

    x, y = pair()
    return Dict(), ({"x": x, "y": y},)


@INTERFACES()
def nested_input() -> tuple[nn.Module, Inputs]:
    class Nested(Net):
        def forward(self, batch: Any) -> Any:
            (x, extra), y = batch["x"], batch["y"]
            return (self.hidden(x + extra[0]) - y).pow(2).mean()

    x, y = pair()
    return Nested(), {"batch": {"x": (x, [torch.randn_like(x)]), "y": y}}


@INTERFACES()
def number_and_flag() -> tuple[nn.Module, Inputs]:
    class Numbers(Net):
        def forward(self, x: Tensor, y: Tensor, scale: float, twice: bool) -> Tensor:
            x = self.one(x) if twice else x
            return (self.hidden(x) * scale - y).pow(2).mean()

    return Numbers(), {**dict(zip("xy", pair(), strict=True)), "scale": 0.5, "twice": 1}


@INTERFACES()
def nothing_for_an_input() -> tuple[nn.Module, Inputs]:
    class Optional(Net):
        def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
            x = x if mask is None else x * mask
            return (self.hidden(x) - y).pow(2).mean()

    return Optional(), (*pair(), None)


@INTERFACES()
def input_that_trains() -> tuple[nn.Module, Inputs]:
    x, y = pair()
    return Net(), (x.requires_grad_(), y)


@INTERFACES()
def rows_come_back() -> tuple[nn.Module, Inputs]:
    class Rows(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.hidden(x)

    return Rows(), pair()[:1]


@INTERFACES()
def loss_and_rows() -> tuple[nn.Module, Inputs]:
    class Both(Net):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            out = self.hidden(x)
            return (out - y).pow(2).mean(), out

    return Both(), pair()


@INTERFACES()
def dict_output() -> tuple[nn.Module, Inputs]:
    class Dict(Net):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            out = self.hidden(x)
            return {"loss": (out - y).pow(2).mean(), "out": out, "best": out.argmax(1)}

    return Dict(), pair()


class Result(NamedTuple):
    left: Tensor
    right: Tensor


@INTERFACES()
def named_tuple_output() -> tuple[nn.Module, Inputs]:
    class Named(Net):
        def forward(self, x: Tensor, y: Tensor) -> Result:
            return Result(self.one(x), self.two(y))

    return Named(), pair()


@dataclasses.dataclass
class Record:
    rows: Tensor
    note: str


@INTERFACES()
def dataclass_output() -> tuple[nn.Module, Inputs]:
    class Data(Net):
        def forward(self, x: Tensor, y: Tensor) -> Record:
            return Record(self.hidden(x) - y, "made here")

    return Data(), pair()


@INTERFACES()
def nested_output() -> tuple[nn.Module, Inputs]:
    class Nested(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            one = self.one(x)
            return {"a": [one, (self.two(one), None)], "b": OrderedDict(y=y * 2)}

    return Nested(), pair()


@INTERFACES()
def several_losses() -> tuple[nn.Module, Inputs]:
    class Losses(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            one = self.one(x)
            first, second = one.pow(2).mean(), (self.two(one) - y).pow(2).mean()
            return {"loss": first + second, "first": first, "second": second}

    return Losses(), pair()


@INTERFACES()
def output_is_input() -> tuple[nn.Module, Inputs]:
    class Same(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self.hidden(x), y

    return Same(), pair()


@INTERFACES(options={"outputs": {"positive": "sum"}})
def count_output() -> tuple[nn.Module, Inputs]:
    class Counted(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            out = self.hidden(x)
            return {"loss": (out - y).pow(2).mean(), "positive": (out > 0).sum()}

    return Counted(), pair()
