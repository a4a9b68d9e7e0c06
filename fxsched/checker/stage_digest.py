"""A digest of what a stage computes: equal for graphs that are, in any process."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import Tensor, fx, nn

ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def stage_digest(module: nn.Module, known: dict[nn.Module, bytes]) -> bytes:
    """Of a module and the graphs that it calls: operations, what they read, constants.

    Of a module that is no graph it is its class. known: digests so far.
    """
    if module not in known:
        known[module] = _digest(module, known)
    return known[module]


def _digest(module: nn.Module, known: dict[nn.Module, bytes]) -> bytes:
    if not isinstance(module, fx.GraphModule):
        return f"{type(module).__module__}.{type(module).__qualname__}".encode()
    text = hashlib.blake2b(digest_size=16)
    number = {node: f"%{i}" for i, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        what: Any = node.target
        if node.op == "call_module":
            what = stage_digest(module.get_submodule(str(what)), known)
        elif node.op == "get_attr":
            what = _constant(module, str(what), known)
        elif node.op == "placeholder":
            what = ""
        line = f"{node.op} {what!r} {_args(node.args, number)}"
        line = f"{line} {_args(node.kwargs, number)}\n"
        text.update(ADDRESS.sub("", line).encode())
    return text.digest()


def _args(value: Any, number: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return number[value]
    if isinstance(value, (tuple, list)):
        return f"({','.join(_args(each, number) for each in value)})"
    if isinstance(value, dict):
        pairs = (f"{key}={_args(each, number)}" for key, each in value.items())
        return f"({','.join(pairs)})"
    return repr(value)


def _constant(module: nn.Module, name: str, known: dict[nn.Module, bytes]) -> str:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    if isinstance(value, nn.Module):
        return stage_digest(value, known).hex()
    strided = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    if not strided or value.is_meta:
        return repr(value)
    numbers = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = numbers.reshape(-1).view(torch.uint8).numpy().tobytes()
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return f"{value.dtype} {tuple(value.shape)} {digest}"
