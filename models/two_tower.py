"""Does this docstring describe this function? One encoder reads the code, another the
docstring, and a head compares what they say: a tree, whose branches can run at once."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Block


@dataclass(frozen=True)
class TwoTowerConfig:
    """Sizes of a TwoTower; both towers are alike."""

    vocabulary: int = 4096
    code_length: int = 64
    doc_length: int = 24
    width: int = 128
    heads: int = 4
    layers: int = 2  # of each tower
    shared_embedding: bool = True  # one (tied) token embedding read by both towers
    dropout: float = 0.0


class Tower(nn.Module):
    """A transformer encoder, averaged over the tokens that are not padding (id 0)."""

    def __init__(
        self, config: TwoTowerConfig, tokens: nn.Embedding, length: int
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = nn.Embedding(length, config.width)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads, dropout=config.dropout)
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        with torch.no_grad():  # start close to a bag of words, which matches already
            for name, weight in self.blocks.named_parameters():
                if name.endswith(("attention.out.weight", "feed.2.weight")):
                    weight.mul_(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, length] -> [batch, width]."""
        keep = tokens != 0
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(place)
        for block in self.blocks:
            x = block(x, keep)
        weight = keep.to(x.dtype)[..., None]
        pooled = (x * weight).sum(1) / weight.sum(1).clamp(min=1.0)
        out: Tensor = self.norm(pooled)
        return out


class TwoTower(nn.Module):
    """Code and docstrings to logits, or with labels to their mean loss."""

    def __init__(self, config: TwoTowerConfig) -> None:
        super().__init__()
        code = doc = embedding(config)
        if not config.shared_embedding:
            doc = embedding(config)
        self.code = Tower(config, code, config.code_length)
        self.doc = Tower(config, doc, config.doc_length)
        self.head = nn.Sequential(
            nn.Linear(4 * config.width, config.width),
            nn.GELU(),
            nn.Linear(config.width, 1),
        )

    def forward(self, code: Tensor, doc: Tensor, label: Tensor | None = None) -> Tensor:
        """code [batch, code_length], doc [batch, doc_length] int64 -> logits [batch].

        With label [batch] (1.0: the docstring is the function's own, 0.0: another's),
        the mean binary cross entropy instead, a scalar.
        """
        c, d = self.code(code), self.doc(doc)
        both = torch.cat([c, d, c * d, (c - d).abs()], -1)
        alike = F.cosine_similarity(c, d)  # a good guess before the head has learned
        logits: Tensor = self.head(both).flatten(0) + 8.0 * alike
        if label is None:
            return logits
        return F.binary_cross_entropy_with_logits(logits, label)


def embedding(config: TwoTowerConfig) -> nn.Embedding:
    """Words are numbered from frequent to rare, and a rare word says more: so the
    embeddings start as long as the logarithm of their id, much like tf-idf."""
    tokens = nn.Embedding(config.vocabulary, config.width)
    length = torch.arange(1, config.vocabulary + 1).log() / 8
    with torch.no_grad():
        tokens.weight.mul_(length[:, None])
    return tokens
