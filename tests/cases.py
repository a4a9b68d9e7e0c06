"""Models, inputs and schedules that the tests share, and eager PyTorch to compare with.

Every model is called as model(*inputs) and returns a mean over the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxsched import Direction, Schedule, schedules
from fxsched.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from fxsched.models.experts import Experts, ExpertsConfig
from fxsched.models.gpt import GPT, GPTConfig
from fxsched.models.mlp import MLP, MLPConfig
from fxsched.models.three_encoder import ThreeEncoder, ThreeEncoderConfig
from fxsched.models.two_tower import TwoTower, TwoTowerConfig
from fxsched.models.unet import UNet, UNetConfig

BATCH, MICROBATCHES = 8, 4


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, 30, shape)


def mlp() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return MLP(MLPConfig()), (torch.randn(BATCH, 32), torch.randn(BATCH, 16))


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return GPT(GPTConfig(vocabulary=64, width=32, layers=2)), (
        tokens(BATCH, 16),
        tokens(BATCH, 16),
    )


def two_tower() -> tuple[nn.Module, tuple[Tensor, ...]]:
    label = torch.arange(BATCH) % 2.0
    model = TwoTower(TwoTowerConfig(vocabulary=64, width=32, layers=1))
    return model, (tokens(BATCH, 12), tokens(BATCH, 9), label)


def encoder_decoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    inputs = (tokens(BATCH, 12), tokens(BATCH, 10), tokens(BATCH, 10))
    config = EncoderDecoderConfig(64, 64, width=32, encoder_layers=1, decoder_layers=2)
    return EncoderDecoder(config), inputs


def unet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    images = torch.randn(BATCH, 3, 16, 16), torch.randn(BATCH, 3, 16, 16)
    return UNet(UNetConfig(width=8)), images


def three_encoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    c = ThreeEncoderConfig(
        image_height=16,
        image_width=16,
        vocabulary=64,
        text_length=6,
        audio_frames=8,
        audio_bins=9,
        width=32,
        heads=2,
        image_layers=1,
        text_layers=1,
        audio_layers=1,
    )
    inputs = (
        torch.randn(BATCH, 1, c.image_height, c.image_width),
        tokens(BATCH, c.text_length),
        torch.randn(BATCH, c.audio_frames, c.audio_bins),
        torch.arange(BATCH) % 2.0,
    )
    return ThreeEncoder(c), inputs


def experts() -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = ExpertsConfig(vocabulary=64, width=32, layers=1, experts=3)
    return Experts(config), (tokens(BATCH, 12), tokens(BATCH, 12))


class Tied(nn.Module):
    """Two towers, each row against all of the batch, of weights that stages share."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
            for _ in range(2)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = self.towers
        logits = first(self.table(x)) @ second(self.table(y)).T
        place = torch.arange(len(x), device=x.device)
        return nn.functional.cross_entropy(logits, place) + logits.square().mean()


def tied() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Tied(), (tokens(BATCH), tokens(BATCH))


# Those that every schedule runs, and those that a few do.
MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    each.__name__: each for each in (mlp, gpt, two_tower, encoder_decoder, unet)
}
BRANCHING = {each.__name__: each for each in (three_encoder, experts)}


def build(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model and a batch, the same in every process."""
    torch.manual_seed(7)
    return (MODELS | BRANCHING)[name]()


def anything(seed: int, workers: int = 4) -> Schedule:
    """A random w and a random n: every job's weights and work on some worker."""
    draw = random.Random(seed)
    jobs = [(s, b, d) for s in range(4) for b in range(MICROBATCHES) for d in Direction]
    places = {job: (draw.randrange(workers), draw.randrange(workers)) for job in jobs}
    order = {job: draw.randrange(100) for job in jobs}
    return Schedule(
        workers,
        MICROBATCHES,
        stages=4,
        w=lambda s, b, d: places[s, b, d],
        n=lambda s, b, d: order[s, b, d],
        name="random",
    )


def apart(workers: int = 4) -> Schedule:
    """F, B and the weights of a job on different workers."""
    forward = Direction.FORWARD

    def w(s: int, b: int, d: Direction) -> tuple[int, int]:
        return (s + 1) % workers, s % workers if d is forward else (-1 - s) % workers

    return Schedule(
        workers, MICROBATCHES, stages=4, w=w, n=lambda s, b, d: b, name="apart"
    )


SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "ddp": lambda: schedules.ddp(4),
    "fsdp": lambda: schedules.fsdp(4),
    "gpipe": lambda: schedules.gpipe(4, MICROBATCHES),
    "one_f_one_b": lambda: schedules.one_f_one_b(4, MICROBATCHES),
    "lpp": lambda: schedules.lpp(4, 2, MICROBATCHES),
    "fslpp": lambda: schedules.fslpp(4, 2, MICROBATCHES),
    "graph": lambda: schedules.graph(4, MICROBATCHES),
    "random": lambda: anything(3),
    "apart": apart,
}


@dataclass
class Result:
    """What training gives: losses, first gradients, parameters and buffers after it."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def microbatch(inputs: Sequence[Any], b: int, count: int) -> list[Any]:
    size = len(inputs[0]) // count
    return [x[b * size : (b + 1) * size] for x in inputs]


def eager_step(model: nn.Module, inputs: Sequence[Any], count: int) -> Tensor:
    """One step of plain PyTorch over the same microbatches; the mean loss."""
    total = torch.zeros(())
    for b in range(count):
        loss = model(*microbatch(inputs, b, count)) / count
        loss.backward()
        total = total + loss.detach()
    return total


def optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    # where a gradient is zero but for rounding, a small eps makes noise a full step
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def train(
    model: nn.Module, step: Callable[[], Tensor], optimizer_name: str, steps: int = 3
) -> Result:
    """Trains; step() gives the loss and leaves gradients on the parameters."""
    result = Result()
    update = optimizer(optimizer_name, model)
    for number in range(steps):
        update.zero_grad()
        result.losses.append(step().detach().clone())
        if not number:
            result.gradients = {
                name: None if p.grad is None else p.grad.clone()
                for name, p in model.named_parameters()
            }
        update.step()
    result.parameters = {n: p.data.clone() for n, p in model.named_parameters()}
    result.buffers = {n: b.clone() for n, b in model.named_buffers()}
    return result


def assert_equal(
    found: Result, wanted: Result, owned: set[str] | None = None, near: float = 1e-6
) -> None:
    """Equal to float tolerance; `owned` names the parameters to look at, None all.

    near: how far parameters near zero may be apart."""
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-5, atol=1e-6)
    for name, gradient in wanted.gradients.items():
        if owned is not None and name not in owned:
            assert found.gradients[name] is None, name
            continue
        largest = 0.0 if gradient is None else gradient.abs().max().item()
        near_zero = 1e-6 * max(1.0, largest)  # sums of terms as large
        torch.testing.assert_close(
            found.gradients[name], gradient, rtol=1e-4, atol=near_zero, msg=name
        )
        torch.testing.assert_close(
            found.parameters[name],
            wanted.parameters[name],
            rtol=1e-5,
            atol=near,
            msg=name,
        )
    for name, buffer in wanted.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, msg=name)
