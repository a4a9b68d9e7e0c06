"""A digest of what a stage computes: equal for graphs that are."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, fx, nn


def stage_digest(module: nn.Module, known: dict[nn.Module, bytes]) -> bytes:
    """Of a module and the graphs that it calls: operations, what they read, constants.

    Of a module that is no graph it is its identity. known: digests so far.
    """
    if module not in known:
        known[module] = _digest(module, known)
    return known[module]


def _digest(module: nn.Module, known: dict[nn.Module, bytes]) -> bytes:
    if not isinstance(module, fx.GraphModule):
        return f"{type(module).__qualname__} {id(module)}".encode()
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
        text.update(f"{node.op} {what!r} {_args(node.args, number)}".encode())
        text.update(f"{_args(node.kwargs, number)}\n".encode())
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
    if isinstance(value, Tensor) and value.device.type != "meta":
        with torch.no_grad():
            return (
                f"{value.dtype} {tuple(value.shape)} {value.untyped_storage()._cdata}"
            )
    return repr(value)
