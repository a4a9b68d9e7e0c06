"""The pre-norm transformer blocks that gpt, two_tower and encoder_decoder share."""

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head attention from x to memory; with memory = x, self attention."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, keep: Tensor | None = None) -> Tensor:
        """x [batch, n, width], memory [batch, m, width] -> [batch, n, width].

        keep [batch, m] is False where memory is padding; not for causal attention.
        """
        q, k, v = (
            project(source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project, source in (
                (self.query, x),
                (self.key, memory),
                (self.value, memory),
            )
        )
        mask = None if keep is None else keep[:, None, None, :]
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Sequential):
    """Linear, GELU, Linear; four times wider inside."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )


class Block(nn.Module):
    """Self attention, then a feed-forward layer, each added to the residual stream."""

    def __init__(
        self, width: int, heads: int, causal: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """x [batch, n, width], keep [batch, n] (False: padding) -> the shape of x."""
        a = self.attention_norm(x)
        x = x + self.dropout(self.attention(a, a, keep))
        x = x + self.dropout(self.feed(self.feed_norm(x)))
        return x


class CrossBlock(nn.Module):
    """Causal self attention, attention to an encoder's output, feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=True)
        self.cross_norm = nn.LayerNorm(width)
        self.cross = Attention(width, heads)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = FeedForward(width)

    def forward(self, x: Tensor, memory: Tensor, keep: Tensor | None = None) -> Tensor:
        """x [batch, n, width], memory [batch, m, width], keep [batch, m] -> as x."""
        a = self.attention_norm(x)
        x = x + self.attention(a, a)
        x = x + self.cross(self.cross_norm(x), memory, keep)
        x = x + self.feed(self.feed_norm(x))
        return x
