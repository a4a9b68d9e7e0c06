"""What tests of shared optimizers measure on programs: gradients and weights."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor, fx, nn

from fxsched.ir import ops

SUMS = (ops.reduce, ops.update, ops.norms)  # what reads gradients


class Even(nn.Module):
    """Sixteen layers, of as many parameters each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.pow(2).mean()


def even() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Even().double(), torch.randn(16, 24, dtype=torch.float64)


def parameters_received(program: fx.GraphModule) -> tuple[int, int, int]:
    """Messages with gradients, those with weights, and the bytes of both."""
    nodes = program.graph.nodes
    sums = [n for n in nodes if n.target is ops.recv and _of_gradients(n)]
    weights = [n for n in nodes if n.target is ops.fetch]
    return len(sums), len(weights), sum(map(_bytes, sums + weights))


def most_gradients(program: fx.GraphModule) -> int:
    """The most bytes of gradients of weights that are alive at once, between nodes."""
    alive: dict[fx.Node, int] = {}
    most = 0
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is ops.free:
            most = max(most, _held(alive))
            for value in node.all_input_nodes:
                alive.pop(value, None)
        elif node.target in (ops.accumulate, ops.reduce) or _of_gradients(node):
            alive[node] = _bytes(node)
    return max(most, _held(alive))


def _held(alive: dict[fx.Node, int]) -> int:
    """Bytes of values, but for sums that have gone on into others in place."""
    into = {n for v in alive if v.target in SUMS for n in v.all_input_nodes}
    into |= {n for v in alive if v.target is ops.accumulate for n in v.all_input_nodes}
    return sum(size for value, size in alive.items() if value not in into)


def _of_gradients(node: fx.Node) -> bool:
    """Whether it is what jobs leave, or workers send, of a group's gradients."""
    if node.target is ops.recv:
        return (
            any(u.target in SUMS or u.op == "output" for u in node.users)
            and (node.meta["bundle"])
        )
    return node.target is ops.bundle and "group" in node.meta


def _bytes(node: fx.Node) -> int:
    specs: Iterable[object] = node.meta["specs"]
    return sum(prod(s.shape) * s.dtype.itemsize for s in specs)  # type: ignore[attr-defined]
