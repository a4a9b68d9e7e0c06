"""A digest of what a stage computes: equal for graphs that are, in any process."""

from __future__ import annotations

import hashlib
import operator
from typing import Any

from torch import Tensor, fx, nn

from ..ir.graph_text import LOCAL, argument_text, constant_digest


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
        what = "" if node.op == "placeholder" else str(node.target)
        if node.op in ("call_module", "get_attr"):
            value: Any = operator.attrgetter(str(node.target))(module)
            if isinstance(value, nn.Module):
                what = stage_digest(value, known).hex()
            elif type(value) in (Tensor, nn.Parameter):  # others have no memory
                what = f"{value.dtype} {tuple(value.shape)} {constant_digest(value)}"
        read = argument_text((node.args, node.kwargs), number)
        text.update(LOCAL.sub("", f"{node.op} {what} {read}\n").encode())
    return text.digest()
