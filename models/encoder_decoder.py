"""An encoder-decoder transformer: every decoder layer reads the encoder's output."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Block, CrossBlock


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """Sizes of an EncoderDecoder."""

    source_vocabulary: int = 256
    target_vocabulary: int = 256
    length: int = 32  # the longest sequence, source or target
    width: int = 64
    heads: int = 4
    encoder_layers: int = 2
    decoder_layers: int = 2


class Embed(nn.Module):
    """Token embedding plus learned position."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, n] -> [batch, n, width]."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.tokens(tokens) + self.positions(place)
        return x


class EncoderDecoder(nn.Module):
    """Source, target and its next tokens, [batch, n], to the mean cross entropy."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        c = config
        self.source = Embed(c.source_vocabulary, c.length, c.width)
        self.encoder = nn.ModuleList(
            Block(c.width, c.heads) for _ in range(c.encoder_layers)
        )
        self.encoder_norm = nn.LayerNorm(c.width)
        self.target = Embed(c.target_vocabulary, c.length, c.width)
        self.decoder = nn.ModuleList(
            CrossBlock(c.width, c.heads) for _ in range(c.decoder_layers)
        )
        self.decoder_norm = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, c.target_vocabulary)

    def forward(self, source: Tensor, target_in: Tensor, target_out: Tensor) -> Tensor:
        """source [batch, n], target_in and target_out [batch, m], all int64 -> loss.

        Source token 0 is padding. The loss is the mean cross entropy over all target
        tokens: leaving some out would weigh microbatches unequally.
        """
        keep = source != 0
        memory = self.source(source)
        for block in self.encoder:
            memory = block(memory, keep)
        memory = self.encoder_norm(memory)

        x = self.target(target_in)
        for block in self.decoder:
            x = block(x, memory, keep)
        logits = self.head(self.decoder_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), target_out.flatten(0, 1))
