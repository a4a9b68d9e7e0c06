"""A decoder-only language model with parallel experts: every token goes through every
expert, and a router says how much of each to take (Jacobs et al. 1991)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Attention, FeedForward


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes of an Experts model."""

    vocabulary: int = 256
    length: int = 64  # the longest sequence
    width: int = 64
    heads: int = 4
    layers: int = 2
    experts: int = 4  # of each layer


class MixtureOfExperts(nn.Module):
    """Feed-forward layers side by side; their outputs are mixed token by token."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(FeedForward(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, n, width] -> the shape of x."""
        share = self.router(x).softmax(-1)
        each = torch.stack([expert(x) for expert in self.experts], -1)
        mixed: Tensor = (each * share[..., None, :]).sum(-1)
        return mixed


class ExpertBlock(nn.Module):
    """Causal self attention, then the experts, each added to the residual stream."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=True)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = MixtureOfExperts(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, n, width] -> the shape of x."""
        a = self.attention_norm(x)
        x = x + self.attention(a, a)
        x = x + self.feed(self.feed_norm(x))
        return x


class Experts(nn.Module):
    """Tokens and targets [batch, n] to the mean cross entropy."""

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        c = config
        self.tokens = nn.Embedding(c.vocabulary, c.width)
        self.positions = nn.Embedding(c.length, c.width)
        self.blocks = nn.ModuleList(
            ExpertBlock(c.width, c.heads, c.experts) for _ in range(c.layers)
        )
        self.norm = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, c.vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets [batch, length] int64 -> the mean cross entropy, a scalar."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(place)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))
