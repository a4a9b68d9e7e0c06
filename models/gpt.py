"""A decoder-only language model whose output weight is its token embedding (tied)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Block


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT."""

    vocabulary: int = 256
    length: int = 32  # the longest sequence
    width: int = 64
    heads: int = 4
    layers: int = 4
    dropout: float = 0.0


class GPT(nn.Module):
    """Tokens and targets [batch, n] to the mean cross entropy."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads, causal=True, dropout=config.dropout)
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        # small, since the tied weight also makes the logits
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets [batch, length] int64 -> the mean cross entropy, a scalar."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(place))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))
