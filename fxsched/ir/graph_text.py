"""What a graph's nodes call and read, as text that is equal in any process."""

from __future__ import annotations

import ctypes
import hashlib
import re
from typing import Any

import torch
from torch import Tensor, fx

from .graphs import name_of

# of one process alone: addresses, and numbers of devices, also 'cuda:0' and
# device(type='cuda', index=0)
LOCAL = re.compile(
    r" at 0x[0-9a-f]+|(?<=cuda):\d+|(?<=[a-z]):\d+(?=')|(?<='), index=\d+(?=\))"
)


def constant_digest(constant: Tensor) -> str:
    """The same for equal numbers; a tensor on the meta device has none."""
    if constant.is_meta:
        return ""
    plain = constant.detach().cpu().resolve_conj().resolve_neg().contiguous()
    numbers = ctypes.string_at(plain.data_ptr(), plain.nbytes)
    return hashlib.blake2b(numbers, digest_size=8).hexdigest()


def argument_text(value: Any, number: dict[fx.Node, str]) -> str:
    """An argument: nodes by their number, functions by their name."""
    if isinstance(value, fx.Node):
        return number[value]
    if isinstance(value, (tuple, list)):
        return f"({', '.join(argument_text(each, number) for each in value)})"
    if isinstance(value, dict):
        items = (
            f"{key!r}: {argument_text(each, number)}" for key, each in value.items()
        )
        return "{" + ", ".join(items) + "}"
    if isinstance(value, slice):
        return f"slice{argument_text((value.start, value.stop, value.step), number)}"
    return function_name(value) if callable(value) else repr(value)


def function_name(target: Any) -> str:
    """A function's or method's name, with its module's."""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{name_of(target)}"
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:
        return str(target)
    return f"{getattr(target, '__module__', None)}.{name}"
