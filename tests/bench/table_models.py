"""The models of `table`, each also as a line of parts for torch's pipelines."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsched.models.three_encoder import (
    Encoder,
    ThreeEncoder,
    ThreeEncoderConfig,
    average,
)
from fxsched.models.two_tower import Tower

from . import norms
from .language import Setup
from .pipelining import Line
from .towers import Part, Stretch


class Model(NamedTuple):
    """A model of the table.

    make: a new one, the same on every rank. inputs: of the whole batch, by name.
    meet: whether rows of the batch meet, so that data parallelism and microbatches
        have another loss than the whole batch.
    blocks: what FSDP wraps. line: the model for pipelines.
    """

    title: str
    make: Callable[[], nn.Module]
    inputs: dict[str, Tensor]
    meet: bool
    blocks: Callable[[nn.Module], list[nn.Module]]
    line: Callable[[], Line]


class Call(nn.Module):
    """A function of tensors that knows the modules it uses."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.used = nn.ModuleList(modules)
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


def language(setup: Setup) -> Model:
    """A GPT, as `peers` has it."""
    tokens, targets = setup.inputs
    config = setup.config
    size = f"width {config.width}, {config.length} tokens"
    return Model(
        f"nanoGPT: {config.layers} blocks, {size}",
        setup.model,
        {"tokens": tokens, "targets": targets},
        False,
        lambda model: list(model.blocks),  # type: ignore[arg-type]
        setup.line,
    )


def three_encoders(setup: Setup) -> Model:
    """models/three_encoder.py: a picture, a text, a sound, and a trunk of them."""
    count = setup.config.layers
    # as much work in each encoder: pictures have more tokens than texts
    config = ThreeEncoderConfig(
        *(64, 64, 8, setup.config.vocabulary, 64, 64),
        width=setup.config.width,
        image_layers=max(count // 2, 1),
        text_layers=max(count // 2, 1),
        audio_layers=max(count // 2, 1),
        trunk_layers=max(count // 8, 1),
    )

    def make() -> ThreeEncoder:
        torch.manual_seed(0)
        return ThreeEncoder(config)

    made, rows = torch.Generator().manual_seed(1), setup.batch
    inputs = {
        "image": torch.randn(rows, 1, 64, 64, generator=made),
        "text": torch.randint(1, config.vocabulary, (rows, 64), generator=made),
        "audio": torch.randn(rows, 64, config.audio_bins, generator=made),
        "label": torch.arange(rows) % 2.0,
    }

    def blocks(model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, ThreeEncoder)
        encoders = model.image, model.text, model.audio
        return [*(b for e in encoders for b in e.blocks), *model.trunk]

    return Model(
        f"three encoders of {config.image_layers} blocks each, width {config.width}",
        make,
        inputs,
        False,
        blocks,
        lambda: _encoders_line(make(), inputs),
    )


def clip(setup: Setup) -> Model:
    """CLIP with a ResNet-18, as `norms` has it."""
    made, rows, length = torch.Generator().manual_seed(1), setup.batch, 64
    given = argparse.Namespace(
        length=length, width=setup.config.width, layers=setup.config.layers
    )
    inputs = {
        "pixels": torch.randn(rows, 3, norms.PIXELS, norms.PIXELS, generator=made),
        "tokens": torch.randint(1, norms.WORDS, (rows, length), generator=made),
    }

    def blocks(model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, norms.Clip)
        return [*model.image, *model.text.blocks]

    return Model(
        f"CLIP: ResNet-18 and a text tower of {given.layers} blocks",
        partial(norms.Clip, given),
        inputs,
        True,
        blocks,
        lambda: _clip_line(norms.Clip(given), inputs),
    )


def _encoders_line(model: ThreeEncoder, inputs: dict[str, Tensor]) -> Line:
    def opened(encoder: Encoder, x: Tensor) -> Tensor:
        x = encoder.embed(x)
        out: Tensor = x + encoder.positions(torch.arange(x.shape[1]))
        return out.contiguous()

    def encoder_parts(name: str, encoder: Encoder) -> Iterator[Part]:
        used = encoder.embed, encoder.positions
        yield Part(name, f"read {name}", Call(partial(opened, encoder), *used))
        for i, block in enumerate(encoder.blocks):
            if name == "text":
                masked = Call(lambda x, text, b=block: b(x, text != 0), block)
                yield Part(f"{name}.{i}", "continue text", masked)
            else:
                yield Part(f"{name}.{i}", "continue", block)
        yield Part(f"{name}.norm", "continue", encoder.norm)

    def joined(*parts: Tensor) -> Tensor:
        for part in parts:
            if part.requires_grad:  # PyTorch's pipelines send nothing else
                part.register_hook(torch.Tensor.contiguous)
        return torch.cat(parts, 1)

    def trunk(block: nn.Module, x: Tensor, text: Tensor) -> Tensor:
        before, after = _token_counts(model)
        out: Tensor = block(x, F.pad(text != 0, (before, after), value=True))
        return out

    def ended(x: Tensor, text: Tensor) -> Tensor:
        before, after = _token_counts(model)
        i, t, a = model.norm(x).split([before, text.shape[1], after], 1)
        i, t, a = i.mean(1), average(t, text != 0), a.mean(1)
        out: Tensor = model.head(torch.cat([i, t, a, i * t, i * a, t * a], -1))
        return out.flatten(0)

    parts = [
        *encoder_parts("image", model.image),
        *encoder_parts("text", model.text),
        *encoder_parts("audio", model.audio),
        Part("join", "join", Call(joined)),
        *(
            Part(f"trunk.{i}", "continue text", Call(partial(trunk, block), block))
            for i, block in enumerate(model.trunk)
        ),
        Part("head", "continue text", Call(ended, model.norm, model.head)),
    ]
    read = {name: x for name, x in inputs.items() if name != "label"}
    loss: Any = F.binary_cross_entropy_with_logits
    return Line(model, parts, Stretch, read, inputs["label"], loss)


def _token_counts(model: ThreeEncoder) -> tuple[int, int]:
    """Of the picture, and of the sound."""
    counts = (e.positions.num_embeddings for e in (model.image, model.audio))
    before, after = counts
    return before, after


def _clip_line(model: norms.Clip, inputs: dict[str, Tensor]) -> Line:
    text: Tower = model.text

    def opened(tokens: Tensor) -> Tensor:
        out: Tensor = text.tokens(tokens)
        return out + text.positions(torch.arange(tokens.shape[1]))

    def closed(x: Tensor, tokens: Tensor) -> Tensor:
        out: Tensor = text.norm(average(x, tokens != 0))
        return out

    def logits(image: Tensor, words: Tensor) -> Tensor:
        pairs = F.normalize(image, dim=-1) @ F.normalize(words, dim=-1).T
        return model.scale.exp() * pairs

    def loss(logits: Tensor, rows: Tensor) -> Tensor:
        own = torch.arange(len(logits))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    first, *rest = model.image
    parts = [
        Part("image.0", "read pixels", first),
        *(Part(f"image.{i}", "continue", m) for i, m in enumerate(rest, 1)),
        Part("text", "read tokens", Call(opened, text.tokens, text.positions)),
        *(
            Part(
                f"text.{i}",
                "continue tokens",
                Call(lambda x, tokens, b=block: b(x, tokens != 0), block),
            )
            for i, block in enumerate(text.blocks)
        ),
        Part("text.norm", "continue tokens", Call(closed, text.norm)),
        Part("logits", "join", Call(logits)),
    ]
    return Line(model, parts, Stretch, inputs, inputs["pixels"], loss)
