"""Models of transformers from small random configurations; nothing is downloaded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .case import BATCH, Inputs, Zoo

VOCABULARY, LENGTH, LABELS, WIDTH = 99, 8, 5, 32
Kwargs = Mapping[str, Any]

# What most configurations share; those that lack a name keep it as an attribute.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
    "num_labels": LABELS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def without_dropout(config: Any) -> Any:
    """The configuration with every dropout 0: eager draws other numbers."""
    for name, value in vars(config).items():
        random = any(word in name for word in ("drop", "mask_time", "mask_feature"))
        if random and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            without_dropout(value)
    return config


def still(model: nn.Module) -> nn.Module:
    """The model with every dropout module off."""
    for module in model.modules():
        if "drop" in type(module).__name__.lower():
            for name in ("p", "drop_prob"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        for name in ("layerdrop", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def build(
    kind: str, inputs: Callable[[Any], Inputs], config: str, values: Kwargs
) -> tuple[nn.Module, Inputs]:
    """A model of a class, from a configuration of a class."""
    import transformers
    from transformers.utils import output_capturing

    settings = without_dropout(getattr(transformers, config)(**values))
    model = still(getattr(transformers, kind)(settings)).train()
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # as it does itself once it has logged
    for each in model.modules():  # as they do themselves in their first call
        if isinstance(each, transformers.PreTrainedModel):
            output_capturing.maybe_install_capturing_hooks(each)
    return model, inputs(model)


def add(
    zoo: Zoo,
    name: str,
    kind: str,
    inputs: Callable[[Any], Inputs],
    values: Kwargs,
    config: str | None = None,
    **options: Any,
) -> None:
    """A row for kind(config(**values)), called with inputs(model)."""
    family = kind.rpartition("For")[0] if "For" in kind else kind
    config = config or family.removesuffix("Model") + "Config"
    make = functools.partial(build, kind, inputs, config, values)
    zoo.add(name, make, **options)


def tokens(length: int = LENGTH, rows: int = BATCH) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length))


def answers() -> Tensor:
    return torch.randint(0, LABELS, (BATCH,))


def images(size: int, channels: int = 3) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


def next_token(model: Any) -> Inputs:
    text = tokens()
    return {"input_ids": text, "labels": text}


def masked_token(model: Any) -> Inputs:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[::2, LENGTH - 2 :] = 0
    return {"input_ids": tokens(), "attention_mask": mask, "labels": tokens()}


def classified_text(model: Any) -> Inputs:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[::2, LENGTH - 2 :] = 0
    return {"input_ids": tokens(), "attention_mask": mask, "labels": answers()}


def classified_image(model: Any) -> Inputs:
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", 32)
    size = size[0] if isinstance(size, list | tuple) else size
    channels = getattr(model.config, "num_channels", 3)
    return {"pixel_values": images(size, channels), "labels": answers()}


def only_image(model: Any) -> Inputs:
    return {"pixel_values": classified_image(model)["pixel_values"]}


def translated(model: Any) -> Inputs:
    return {"input_ids": tokens(), "labels": tokens(6)}
