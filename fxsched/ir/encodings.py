"""How values travel between workers in fewer bytes, where encode= asks for that.

A value is cast, or becomes int8: blocks of 256 elements, each with a float32 scale, as
in ZeRO++ (Wang et al. 2023). An element x of a block becomes round(x / scale), where
scale = max|x| / 127; it comes back as that times the scale. If a block has NaN or Inf,
all of it comes back as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .pieces import layout_of

Specs = tuple[Any, ...]  # as in graphs, which imports ops
BLOCK = 256
TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8)


class Encode(NamedTuple):
    """The type in which values of each kind travel between workers; None for as they
    are. gradients: of weights."""

    activations: torch.dtype | None = None
    weights: torch.dtype | None = None
    gradients: torch.dtype | None = None


AS_IT_IS = Encode()
# How a tensor travels: in which type; its own type; its dimensions and its shape, as in
# pieces.Layout.
Code = tuple[torch.dtype, torch.dtype, tuple[int, ...], tuple[int, ...]]
Codes = tuple[Code | None, ...]  # of a value's tensors; None for one that stays exact


def codes_of(specs: Specs, sent: torch.dtype | None) -> Codes | None:
    """How tensors travel in this type; None if all do as they are.

    Numbers (0-d), such as losses, integers, and what would take no fewer bytes stay as
    they are.
    """
    codes: list[Code | None] = []
    for spec in specs:
        code = None
        if sent is not None and spec.shape and spec.dtype.is_floating_point:
            ((order, shape),) = layout_of((spec,))
            new: Code = sent, spec.dtype, order, shape
            if _bytes(_code_specs(new, spec)) < spec.bytes:
                code = new
        codes.append(code)
    return tuple(codes) if any(codes) else None


def sent_bytes(specs: Specs, sent: torch.dtype | None) -> int:
    """Bytes of what travels of tensors, if they do in this type."""
    return _bytes(encoded_specs(codes_of(specs, sent), specs))


def encoded_specs(codes: Codes | None, specs: Specs) -> Specs:
    """The shapes of what travels."""
    found: list[Any] = []
    for code, spec in zip(codes or [None] * len(specs), specs, strict=True):
        found += [spec] if code is None else _code_specs(code, spec)
    return tuple(found)


def encode(codes: Codes, value: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What travels of a tensor, or of a bundle of them."""
    values = (value,) if isinstance(value, Tensor) else value
    found: list[Tensor] = []
    for code, each in zip(codes, values, strict=True):
        sent, _, order, _ = code or (each.dtype, None, (), ())
        if code is not None and sent is torch.int8:
            found += _blocks(each.permute(order))
        else:
            found.append(each.to(sent))
    return tuple(found)


def decode(codes: Codes, travelled: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The bundle that was encoded, rounded."""
    values, found = iter(travelled), []
    for code in codes:
        each = next(values)
        sent, own, order, shape = code or (None, each.dtype, (), ())
        if sent is torch.int8:
            back = sorted(range(len(order)), key=order.__getitem__)
            each = _flat(each, next(values)).view(shape).permute(back)
        found.append(each.to(own))
    return tuple(found)


def decode_one(codes: Codes, travelled: Sequence[Tensor]) -> Tensor:
    """The tensor that was encoded, rounded."""
    (value,) = decode(codes, travelled)
    return value


def _code_specs(code: Code, spec: Any) -> Specs:
    sent, *_ = code
    if sent is not torch.int8:
        cast = spec.empty("meta").to(sent)
        return (spec._replace(stride=tuple(cast.stride()), dtype=sent),)
    size = spec.bytes // spec.dtype.itemsize
    blocks = spec.run(-(-size // BLOCK))
    return (
        spec.run(size)._replace(dtype=torch.int8),
        blocks._replace(dtype=torch.float32),
    )


def _bytes(specs: Specs) -> int:
    return sum(spec.bytes for spec in specs)


def _padded(flat: Tensor) -> Tensor:
    """In rows of a block, with zeros at the end."""
    return pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _blocks(value: Tensor) -> tuple[Tensor, Tensor]:
    flat = value.reshape(-1).float()
    blocks = _padded(flat)
    scales = torch.linalg.vector_norm(blocks, torch.inf, 1, keepdim=True) / 127
    least = torch.finfo(torch.float32).tiny  # a block of zeros has a scale, too
    rounded = (blocks / scales.clamp_(min=least)).round_().nan_to_num_(0)
    return rounded.to(torch.int8).view(-1)[: flat.numel()], scales.view(-1)


def _flat(rounded: Tensor, scales: Tensor) -> Tensor:
    blocks = _padded(rounded) * scales[:, None]
    return blocks.view(-1)[: rounded.numel()]
