"""Gradients to the bit: a plan's beside those of microbatches one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxsched
from fxsched import Schedule
from fxsched import schedules as library
from fxsched.models.gpt import GPT, GPTConfig

from .cases import MICROBATCHES, anything, build

Gradients = dict[str, Tensor]


class PostNorm(nn.Module):
    """Blocks that read their input several times, a tied embedding, and dropout."""

    def __init__(self, dropout: float, blocks: int) -> None:
        super().__init__()
        self.embed, self.dropout = nn.Embedding(40, 16), dropout
        self.query = nn.ModuleList(nn.Linear(16, 16) for _ in range(blocks))
        self.key = nn.ModuleList(nn.Linear(16, 16) for _ in range(blocks))
        self.norm = nn.ModuleList(nn.LayerNorm(16) for _ in range(blocks))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)
        for query, key, norm in zip(self.query, self.key, self.norm, strict=True):
            weights = (query(hidden) @ key(hidden).mT).softmax(-1)
            mixed = nn.functional.dropout(weights @ hidden, self.dropout)
            hidden = norm(hidden + mixed)
        logits = hidden @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


class Chain(nn.Module):
    """Blocks in a line, each with dropout, which any cut between them leaves exact."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self._block() for _ in range(4)))
        self.head = nn.Linear(16, 16)

    def _block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.blocks(x)) - y).square().mean()


class Contrastive(nn.Module):
    """Two towers with dropout, whose rows meet in a loss over all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = self._tower(), self._tower()

    def _tower(self) -> nn.Module:
        block = nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)
        return nn.Sequential(*block, nn.Linear(16, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pairs = self.left(x) @ self.right(y).T
        return nn.functional.cross_entropy(pairs, torch.arange(len(x)))


OWN = {"tied": (0.0, 1), "post_norm": (0.0, 3), "dropout": (0.2, 1)}
DRAWN = {
    "gpt_dropout": lambda: build_gpt(0.2),
    "chain": lambda: (Chain(), (torch.randn(8, 16), torch.randn(8, 16))),
    "contrastive": lambda: (Contrastive(), (torch.randn(8, 16), torch.randn(8, 16))),
}
# whose plans of one worker are what others are compared with
PLANNED = ("dropout", *DRAWN)
MODELS = ("mlp", "gpt", "two_tower", "unet", "encoder_decoder", *OWN, *DRAWN)


def build_gpt(dropout: float) -> tuple[nn.Module, tuple[Tensor, ...]]:
    words = torch.randint(0, 40, (8, 6))
    config = GPTConfig(40, 6, 16, 2, 4, dropout)
    return GPT(config), (words, words.roll(-1, 1))


def model_of(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    if name in DRAWN:
        return DRAWN[name]()
    if name not in OWN:
        return build(name)
    words = torch.randint(0, 40, (8, 5)), torch.randint(0, 40, (8, 5))
    return PostNorm(*OWN[name]), words


def schedules(ranks: int, seeds: int) -> dict[str, Callable[[], Schedule]]:
    """By name; seeds: how many random ones."""
    w, m = ranks or 4, MICROBATCHES
    found: dict[str, Callable[[], Schedule]] = {
        "ddp": lambda: library.ddp(w, m),
        "fsdp": lambda: library.fsdp(w, m),
        "zero2": lambda: library.zero2(w, m),
        "gpipe": lambda: library.gpipe(w, m),
        "1f1b": lambda: library.one_f_one_b(w, m),
        "zb_h1": lambda: library.zb_h1(w, m),
        "lpp": lambda: library.lpp(w, 2, m),
        "replicated": lambda: library.replicate(library.gpipe(w // 2, m // 2), 2),
    }
    for seed in range(seeds):
        found[f"anything {seed}"] = lambda seed=seed: anything(seed, w)  # type: ignore[misc]
    return found


def one_by_one(model: nn.Module, inputs: tuple[Tensor, ...]) -> Gradients:
    """Plain PyTorch: each microbatch's loss, over their number, and its backward."""
    model = copy.deepcopy(model)
    for part in zip(*(x.chunk(MICROBATCHES) for x in inputs), strict=True):
        (model(*part) / MICROBATCHES).backward()
    return gradients(model)


def gradients(model: nn.Module) -> Gradients:
    """Those that there are here."""
    named = model.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}


def planned(
    model: nn.Module, schedule: Schedule, inputs: tuple[Tensor, ...], **options: Any
) -> Gradients:
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    torch.manual_seed(7)
    with fxsched.backend(schedule, deterministic=True, **options) as backend:
        torch.compile(model, backend=backend)(*inputs).backward()
        return gradients(model)


def compare(name: str, schedule: Schedule, **options: Any) -> bool:
    """Raises AssertionError for a gradient with other bits than in one process; whether
    the cut was not refused."""
    model, inputs = model_of(name)
    if name in PLANNED:
        one = library.gpipe(1, MICROBATCHES)
        wanted = planned(model, one, inputs, transport="threads")
    else:
        wanted = one_by_one(model, inputs)
    ranks = "distributed" if dist.is_initialized() else "threads"
    options.setdefault("transport", ranks)
    try:
        found = planned(model, schedule, inputs, **options)
    except fxsched.PlanError as error:
        if "other bits" not in str(error):
            raise
        print(f"  refused: {error}")
        return False
    assert found if dist.is_initialized() else found.keys() == wanted.keys()
    far = [key for key, value in found.items() if not torch.equal(value, wanted[key])]
    assert not far, f"{name}, {schedule.name}, {options}: {far} have other bits"
    return True
