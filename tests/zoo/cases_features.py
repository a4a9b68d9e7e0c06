"""What PyTorch lets a model do: sharing, hooks, casts, transforms, odd inputs."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from .case import BATCH, PIPELINES, Inputs, Zoo

FEATURES = Zoo("features")
WIDTH = 16


class Net(nn.Module):
    """Two halves, and the mean square of what comes out; rows change `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.two = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))

    def hidden(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.one(x))
        return out

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return (self.hidden(x) - y).pow(2).mean()


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    size = (BATCH, *(shape or (WIDTH,)))
    return torch.randn(size), torch.randn(size)


# Parameters


@FEATURES()
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


@FEATURES()
def shared_module() -> tuple[nn.Module, Inputs]:
    net = Net()
    net.two = net.one
    return net, pair()


@FEATURES()
def frozen_part() -> tuple[nn.Module, Inputs]:
    net = Net()
    net.one.requires_grad_(False)
    return net, pair()


@FEATURES()
def frozen_end() -> tuple[nn.Module, Inputs]:
    net = Net()
    net.two.requires_grad_(False)
    return net, pair()


@FEATURES()
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


@FEATURES()
def unused_parameter() -> tuple[nn.Module, Inputs]:
    net = Net()
    net.never = nn.Linear(3, 3)
    return net, pair()


@FEATURES()
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


@FEATURES()
def parameter_used_twice() -> tuple[nn.Module, Inputs]:
    class Twice(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return self.two(self.one(self.two(self.one(x))))

    return Twice(), pair()


@FEATURES()
def weight_norm() -> tuple[nn.Module, Inputs]:
    net = Net()
    parametrizations.weight_norm(net.one[0])
    return net, pair()


@FEATURES()
def weight_norm_by_hook() -> tuple[nn.Module, Inputs]:
    net = Net()
    torch.nn.utils.weight_norm(net.one[0])
    return net, pair()


@FEATURES(schedules=PIPELINES, apart=False)
def spectral_norm() -> tuple[nn.Module, Inputs]:
    net = Net()
    parametrizations.spectral_norm(net.one[0])
    return net, pair()


@FEATURES(schedules=PIPELINES, apart=False)
def spectral_norm_by_hook() -> tuple[nn.Module, Inputs]:
    net = Net()
    torch.nn.utils.spectral_norm(net.one[0])
    return net, pair()


@FEATURES()
def orthogonal() -> tuple[nn.Module, Inputs]:
    net = Net()
    parametrizations.orthogonal(net.two[0], orthogonal_map="cayley")
    return net, pair()


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@FEATURES()
def own_parametrization() -> tuple[nn.Module, Inputs]:
    class Square(Net):
        def __init__(self) -> None:
            super().__init__()
            self.middle = nn.Linear(WIDTH, WIDTH)
            parametrize.register_parametrization(self.middle, "weight", Symmetric())

        def hidden(self, x: Tensor) -> Tensor:
            return self.two(self.middle(self.one(x)))

    return Square(), pair()


@FEATURES()
def pruned() -> tuple[nn.Module, Inputs]:
    from torch.nn.utils import prune

    net = Net()
    prune.l1_unstructured(net.one[0], "weight", 0.5)
    return net, pair()


@FEATURES()
def low_precision_part() -> tuple[nn.Module, Inputs]:
    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.one.double()

        def hidden(self, x: Tensor) -> Tensor:
            return self.two(self.one(x.double()).float())

    return Mixed(), pair()


@FEATURES()
def double_precision() -> tuple[nn.Module, Inputs]:
    x, y = pair()
    return Net().double(), (x.double(), y.double())


@FEATURES()
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


@FEATURES()
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


@FEATURES()
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


@FEATURES()
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


# Buffers


@FEATURES()
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


@FEATURES(schedules=PIPELINES, apart=False)
def buffer_written_in_place() -> tuple[nn.Module, Inputs]:
    class InPlace(Counter):
        def hidden(self, x: Tensor) -> Tensor:
            x = self.one(x)
            self.calls.add_(1)
            self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return self.two(x)

    return InPlace(), pair()


@FEATURES(schedules=PIPELINES, apart=False)
def buffer_reassigned() -> tuple[nn.Module, Inputs]:
    class Reassigned(Counter):
        def hidden(self, x: Tensor) -> Tensor:
            x = self.one(x)
            self.calls = self.calls + 1
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
            return self.two(x - self.average)

    return Reassigned(), pair()


@FEATURES()
def bool_buffer() -> tuple[nn.Module, Inputs]:
    class Masked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.arange(WIDTH) % 2 == 0)

        def hidden(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).masked_fill(self.mask, 0.0))

    return Masked(), pair()


# Inputs and outputs


@FEATURES()
def inputs_by_name() -> tuple[nn.Module, Inputs]:
    x, y = pair()
    return Net(), {"y": y, "x": x}


@FEATURES()
def dict_input() -> tuple[nn.Module, Inputs]:
    class Dict(Net):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return (self.hidden(batch["x"]) - batch["y"]).pow(2).mean()

    x, y = pair()
    return Dict(), ({"x": x, "y": y},)


@FEATURES()
def nested_input() -> tuple[nn.Module, Inputs]:
    class Nested(Net):
        def forward(self, batch: Any) -> Any:
            (x, extra), y = batch["x"], batch["y"]
            return (self.hidden(x + extra[0]) - y).pow(2).mean()

    x, y = pair()
    return Nested(), {"batch": {"x": (x, [torch.randn_like(x)]), "y": y}}


@FEATURES()
def number_and_flag() -> tuple[nn.Module, Inputs]:
    class Numbers(Net):
        def forward(self, x: Tensor, y: Tensor, scale: float, twice: bool) -> Tensor:
            x = self.one(x) if twice else x
            return (self.hidden(x) * scale - y).pow(2).mean()

    return Numbers(), {**dict(zip("xy", pair(), strict=True)), "scale": 0.5, "twice": 1}


@FEATURES()
def nothing_for_an_input() -> tuple[nn.Module, Inputs]:
    class Optional(Net):
        def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
            x = x if mask is None else x * mask
            return (self.hidden(x) - y).pow(2).mean()

    return Optional(), (*pair(), None)


@FEATURES()
def input_that_trains() -> tuple[nn.Module, Inputs]:
    x, y = pair()
    return Net(), (x.requires_grad_(), y)


@FEATURES()
def rows_come_back() -> tuple[nn.Module, Inputs]:
    class Rows(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.hidden(x)

    return Rows(), pair()[:1]


@FEATURES()
def loss_and_rows() -> tuple[nn.Module, Inputs]:
    class Both(Net):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            out = self.hidden(x)
            return (out - y).pow(2).mean(), out

    return Both(), pair()


@FEATURES()
def dict_output() -> tuple[nn.Module, Inputs]:
    class Dict(Net):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            out = self.hidden(x)
            return {"loss": (out - y).pow(2).mean(), "out": out, "best": out.argmax(1)}

    return Dict(), pair()


class Result(NamedTuple):
    left: Tensor
    right: Tensor


@FEATURES()
def named_tuple_output() -> tuple[nn.Module, Inputs]:
    class Named(Net):
        def forward(self, x: Tensor, y: Tensor) -> Result:
            return Result(self.one(x), self.two(y))

    return Named(), pair()


@dataclasses.dataclass
class Record:
    rows: Tensor
    note: str


@FEATURES()
def dataclass_output() -> tuple[nn.Module, Inputs]:
    class Data(Net):
        def forward(self, x: Tensor, y: Tensor) -> Record:
            return Record(self.hidden(x) - y, "made here")

    return Data(), pair()


@FEATURES()
def nested_output() -> tuple[nn.Module, Inputs]:
    class Nested(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            one = self.one(x)
            return {"a": [one, (self.two(one), None)], "b": OrderedDict(y=y * 2)}

    return Nested(), pair()


@FEATURES()
def several_losses() -> tuple[nn.Module, Inputs]:
    class Losses(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            one = self.one(x)
            first, second = one.pow(2).mean(), (self.two(one) - y).pow(2).mean()
            return {"loss": first + second, "first": first, "second": second}

    return Losses(), pair()


@FEATURES()
def output_is_input() -> tuple[nn.Module, Inputs]:
    class Same(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self.hidden(x), y

    return Same(), pair()


@FEATURES(options={"outputs": {"positive": "sum"}})
def count_output() -> tuple[nn.Module, Inputs]:
    class Counted(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            out = self.hidden(x)
            return {"loss": (out - y).pow(2).mean(), "positive": (out > 0).sum()}

    return Counted(), pair()


# Several parts


class Tower(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@FEATURES()
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


@FEATURES()
def siamese() -> tuple[nn.Module, Inputs]:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Tower(2)

        def forward(self, x: Tensor, near: Tensor, other: Tensor) -> Tensor:
            one, two, three = self.tower(x), self.tower(near), self.tower(other)
            return F.triplet_margin_loss(one, two, three)

    return Siamese(), tuple(torch.randn(BATCH, WIDTH) for _ in range(3))


@FEATURES()
def two_heads() -> tuple[nn.Module, Inputs]:
    class Heads(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            body = self.one(x)
            return (self.two(body) - y).pow(2).mean() + body.abs().mean()

    return Heads(), pair()


@FEATURES()
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


@FEATURES()
def autoencoder() -> tuple[nn.Module, Inputs]:
    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return F.mse_loss(self.up(F.relu(self.down(x))), x)

    return Auto(), pair()[:1]


@FEATURES()
def long_skip() -> tuple[nn.Module, Inputs]:
    class Skip(Net):
        def hidden(self, x: Tensor) -> Tensor:
            kept = [x]
            for half in (self.one, self.two, self.one, self.two):
                kept.append(half(kept[-1]) + sum(kept))
            return torch.stack(kept).mean(0)

    return Skip(), pair()


# Autograd


@FEATURES()
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


@FEATURES()
def own_autograd_function() -> tuple[nn.Module, Inputs]:
    class Own(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return self.two(Doubled.apply(self.one(x)))

    return Own(), pair()


@FEATURES()
def detached() -> tuple[nn.Module, Inputs]:
    class Detached(Net):
        def hidden(self, x: Tensor) -> Tensor:
            one = self.one(x)
            return self.two(one.detach()) + one

    return Detached(), pair()


@FEATURES()
def no_grad_inside() -> tuple[nn.Module, Inputs]:
    class Inside(Net):
        def hidden(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.one(x)
            return self.two(x) - target

    return Inside(), pair()


@FEATURES()
def straight_through() -> tuple[nn.Module, Inputs]:
    class Straight(Net):
        def hidden(self, x: Tensor) -> Tensor:
            one = self.one(x)
            return self.two(one + (one.round() - one).detach())

    return Straight(), pair()


@FEATURES()
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


@FEATURES()
def func_grad() -> tuple[nn.Module, Inputs]:
    class Energy(Net):
        def hidden(self, x: Tensor) -> Tensor:
            force = torch.func.grad(lambda z: self.two(z).pow(2).sum())(self.one(x))
            return force

    return Energy(), pair()


@FEATURES()
def func_vmap() -> tuple[nn.Module, Inputs]:
    class Mapped(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return torch.func.vmap(lambda row: self.two(self.one(row)))(x)

    return Mapped(), pair()


@FEATURES()
def func_jvp() -> tuple[nn.Module, Inputs]:
    class Tangent(Net):
        def hidden(self, x: Tensor) -> Tensor:
            value, tangent = torch.func.jvp(self.two, (self.one(x),), (x,))
            return value + tangent

    return Tangent(), pair()


@FEATURES()
def gradient_inside() -> tuple[nn.Module, Inputs]:
    class Inside(Net):
        def hidden(self, x: Tensor) -> Tensor:
            x = self.one(x).detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.two(x).sum(), x, create_graph=True)
            return slope

    return Inside(), pair()


@FEATURES()
def functional_call() -> tuple[nn.Module, Inputs]:
    class Called(Net):
        def hidden(self, x: Tensor) -> Tensor:
            doubled = {n: p * 2 for n, p in self.two.named_parameters()}
            return torch.func.functional_call(self.two, doubled, (self.one(x),))

    return Called(), pair()


@FEATURES()
def forward_hooks() -> tuple[nn.Module, Inputs]:
    net = Net()
    net.one.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    net.two.register_forward_hook(lambda module, given, out: out + 1)
    return net, pair()


# Casts and kinds of numbers


@FEATURES(autocast=True)
def autocast() -> tuple[nn.Module, Inputs]:
    return Net(), pair()


@FEATURES(autocast=True)
def autocast_attention() -> tuple[nn.Module, Inputs]:
    class Attention(Net):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def hidden(self, x: Tensor) -> Tensor:
            return self.two(self.attention(x, x, x)[0].float())

    return Attention(), pair(4, WIDTH)


@FEATURES()
def autocast_inside() -> tuple[nn.Module, Inputs]:
    class Inside(Net):
        def hidden(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                x = self.one(x)
            return self.two(x)

    return Inside(), pair()


@FEATURES()
def complex_numbers() -> tuple[nn.Module, Inputs]:
    class Fourier(Net):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))

        def hidden(self, x: Tensor) -> Tensor:
            waves = torch.fft.rfft(self.one(x)) * self.filter
            return self.two(torch.fft.irfft(waves, n=WIDTH))

    return Fourier(), pair()


@FEATURES()
def complex_linear() -> tuple[nn.Module, Inputs]:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = (nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat) for _ in range(4))
            self.net = nn.Sequential(*layers)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(torch.complex(x, x.flip(1))).abs().mean()

    return Complex(), pair()[:1]


@FEATURES()
def spectrogram() -> tuple[nn.Module, Inputs]:
    class Spectrum(Net):
        def forward(self, sound: Tensor, y: Tensor) -> Tensor:
            window = torch.hann_window(30, device=sound.device)
            waves = torch.stft(sound, 30, 16, window=window, return_complex=True)
            return (self.hidden(waves.abs().transpose(1, 2)) - y).pow(2).mean()

    sound = torch.randn(BATCH, 64)
    return Spectrum(), (sound, torch.randn(BATCH, 5, WIDTH))


@FEATURES()
def linear_algebra() -> tuple[nn.Module, Inputs]:
    class Solve(Net):
        def hidden(self, x: Tensor) -> Tensor:
            square = self.one(x).reshape(-1, 4, 4)
            eye = torch.eye(4) * 5
            return self.two(torch.linalg.solve(square + eye, square).flatten(1))

    return Solve(), pair()


@FEATURES()
def scan_with_cumsum() -> tuple[nn.Module, Inputs]:
    class Scan(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).cumsum(-1).logcumsumexp(-1))

    return Scan(), pair()


@FEATURES()
def einsum() -> tuple[nn.Module, Inputs]:
    class Einsum(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.randn(WIDTH, 3, WIDTH))

        def hidden(self, x: Tensor) -> Tensor:
            x = self.one(x)
            return self.two(
                torch.einsum("bi,ihj,bj->bh", x, self.mix, x).repeat(1, 6)[:, :16]
            )

    return Einsum(), pair()


@FEATURES()
def index_and_scatter() -> tuple[nn.Module, Inputs]:
    class Scatter(Net):
        def hidden(self, x: Tensor) -> Tensor:
            x = self.one(x)
            order = x.argsort(1)
            out = torch.zeros_like(x).scatter_add(1, order, x)
            top, _ = out.topk(4, dim=1)
            return self.two(torch.cat([top.gather(1, order[:, :4] % 4), out[:, 4:]], 1))

    return Scatter(), pair()


@FEATURES()
def slices_written() -> tuple[nn.Module, Inputs]:
    class Written(Net):
        def hidden(self, x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            out[:, ::2] = self.one(x)[:, ::2]
            out[:, 1::2] += x[:, :8]
            return self.two(out)

    return Written(), pair()


@FEATURES()
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


@FEATURES()
def loop_over_time() -> tuple[nn.Module, Inputs]:
    class Loop(Net):
        def hidden(self, x: Tensor) -> Tensor:
            state = torch.zeros_like(x[:, 0])
            for step in x.unbind(1):
                state = torch.tanh(self.one(state) + self.two(step))
            return state.unsqueeze(1)

    return Loop(), pair(5, WIDTH)


@FEATURES()
def python_branch() -> tuple[nn.Module, Inputs]:
    class Branch(Net):
        def hidden(self, x: Tensor) -> Tensor:
            if self.training and x.shape[-1] == WIDTH:
                x = self.one(x)
            return self.two(x)

    return Branch(), pair()


@FEATURES(apart=False)
def branch_on_data() -> tuple[nn.Module, Inputs]:
    class Branch(Net):
        def hidden(self, x: Tensor) -> Tensor:
            x = self.one(x)
            if x.sum() > 0:
                x = x * 2
            return self.two(x)

    return Branch(), pair()


@FEATURES(apart=False)
def cond() -> tuple[nn.Module, Inputs]:
    class Cond(Net):
        def hidden(self, x: Tensor) -> Tensor:
            x = self.one(x)
            x = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))
            return self.two(x)

    return Cond(), pair()


@FEATURES()
def evaluation_mode() -> tuple[nn.Module, Inputs]:
    net = Net()
    net.one.insert(1, nn.BatchNorm1d(32))
    net.two.insert(1, nn.Dropout(0.5))
    return net.eval(), pair()


@FEATURES()
def sequential_of_names() -> tuple[nn.Module, Inputs]:
    layers = OrderedDict(
        first=nn.Linear(WIDTH, 32), act=nn.SiLU(), last=nn.Linear(32, WIDTH)
    )
    return nn.Sequential(layers), pair()[:1]


@FEATURES(apart=False)
def contrastive() -> tuple[nn.Module, Inputs]:
    class Contrast(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            scores = F.normalize(self.one(x)) @ F.normalize(self.two(y)).T
            return F.cross_entropy(scores * 5, torch.arange(x.shape[0]))

    return Contrast(), pair()


@FEATURES(options={"batch_dims": {"x": 1, "y": 1}})
def sequence_first() -> tuple[nn.Module, Inputs]:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.layer(x) - y).pow(2).mean()

    x, y = (torch.randn(5, BATCH, WIDTH) for _ in range(2))
    return First(), {"x": x, "y": y}


@FEATURES()
def buffer_for_positions() -> tuple[nn.Module, Inputs]:
    class Positions(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ids", torch.arange(12).unsqueeze(0))
            self.table = nn.Embedding(12, WIDTH)

        def hidden(self, x: Tensor) -> Tensor:
            return self.two(self.one(x) + self.table(self.ids[:, : x.shape[1]]))

    return Positions(), pair(5, WIDTH)
