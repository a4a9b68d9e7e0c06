"""Attention with dropout, written out so that its heads can be in parts.

On the CPU torch computes it by two products of matrices, with a dropout of the weights
between them: written out, that draws the numbers that it draws inside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..costmodel.costs import Work, copied
from ..ir.facts import FACTS, facts
from ..ir.graphs import tensors
from ..ir.lazy import lazy_module
from ..ir.regions import Regions
from .layouts import Follower, Operation, value_of
from .nodes import in_flow

aten = torch.ops.aten
TARGETS = (
    F.scaled_dot_product_attention,
    aten.scaled_dot_product_attention.default,
)
HALVES = (torch.float16, torch.bfloat16)


class Opened(NamedTuple):
    """A graph whose attention with dropout is written out.

    origins: the nodes of the graph before that, by those that give the same now.
    """

    gm: fx.GraphModule
    origins: Mapping[fx.Node, fx.Node]


def open_attention(gm: fx.GraphModule) -> Opened:
    """Writes attention with dropout out where torch computes it so: on the CPU.

    before: y = scaled_dot_product_attention(q, k, v, None, 0.1)
    after:  weights = attention_weights(q, k, None, 0.35)
            dropped = dropout(weights, 0.1)
            y = attended(dropped, v, float32)

    Heads of keys and values that several heads of queries share are repeated first.
    """
    nodes = in_flow(gm.graph.nodes)
    if not any(map(draws_on_cpu, nodes)):
        return Opened(gm, {node: node for node in nodes})
    follower, graph = Follower(gm, 1), fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    with Regions() as regions:
        for node in nodes:
            regions.pass_by(node)
            if draws_on_cpu(node):
                new[node] = _Writer(follower, graph, node).write(new)
            else:
                new[node] = graph.node_copy(node, new.__getitem__)
    opened = lazy_module(gm, graph, "Opened")
    opened.meta[FACTS] = facts(gm)
    return Opened(opened, {mine: node for node, mine in new.items()})


def draws_on_cpu(node: fx.Node) -> bool:
    """Whether a node is attention with dropout, computed as it is on the CPU."""
    return (
        node.target in TARGETS
        and node.meta.get("random") == 1
        and not node.meta.get("joint")
        and all(t.device.type == "cpu" for t in tensors(value_of(node)))
    )


class _Call(NamedTuple):
    """The arguments of scaled_dot_product_attention."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class _Writer:
    """Writes one call of attention out."""

    def __init__(self, follower: Follower, graph: fx.Graph, node: fx.Node) -> None:
        self.follower, self.graph, self.node = follower, graph, node

    def write(self, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """The node that gives the call's value, on values of the new graph."""
        node, (flops, forward, backward, held) = self.node, self.node.meta["work"]
        third = Work(flops // 2, forward / 3, backward / 3, held // 3)
        given: Any = fx.map_arg((node.args, node.kwargs), new.__getitem__)
        call = _Call(*given[0], **given[1])
        query, width = call.query, int(value_of(call.query).shape[-1])
        scale = 1 / math.sqrt(width) if call.scale is None else call.scale
        key, value = (self._repeated(call, each) for each in (call.key, call.value))
        mask = self._causal(call) if call.is_causal else call.attn_mask
        weights = self._add(attention_weights, (query, key, mask, scale), third)
        dropped = self._add(
            F.dropout, (weights, call.dropout_p), third._replace(flops=0)
        )
        dropped.meta["random"] = node.meta["random"]
        out = self._add(attended, (dropped, value, value_of(node).dtype), third)
        assert value_of(out).shape == value_of(node).shape, (
            f"{node} opened gives {value_of(out).shape}"
        )
        out.meta["key"] = node.meta["key"]
        return out

    def _repeated(self, call: _Call, read: fx.Node) -> fx.Node:
        """Keys or values, as many heads of them as of queries."""
        shapes = (value_of(each).shape for each in (call.query, read))
        heads, groups = (int(shape[-3]) if len(shape) > 2 else 1 for shape in shapes)
        if not call.enable_gqa or heads == groups:
            return read
        return self._copy(torch.repeat_interleave, (read, heads // groups, -3))

    def _causal(self, call: _Call) -> fx.Node:
        """Which keys each query sees that sees those before it."""
        query, key = value_of(call.query), value_of(call.key)
        sizes = (int(query.shape[-2]), int(key.shape[-2]))
        options = {"dtype": torch.bool, "device": query.device}
        return self._copy(torch.tril, (self._copy(torch.ones, (sizes,), options),))

    def _copy(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        new = self._add(target, args, Work(0, 0.0, 0.0, 0), kwargs)
        new.meta["work"] = copied(value_of(new))
        return new

    def _add(
        self,
        target: Any,
        args: tuple[Any, ...],
        work: Work,
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        """Another operation where the call is."""
        new = self.graph.call_function(target, args, kwargs)
        given = fx.map_arg((new.args, new.kwargs), value_of)
        new.meta = {
            **self.node.meta,
            "val": self.follower.run(Operation.of(new), *given),
            "work": work,
            "random": 0,
            "mutates": (),
            "key": f"{self.node.meta['key']}:{new.name}",
        }
        return new


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """What attention weighs values by, as torch computes it on the CPU.

    mask: added to the scores; of bools, those to keep.
    """
    cast = _autocast(query)
    query, key = _precise(query, cast), _precise(key, cast)
    factor = math.sqrt(abs(scale))
    with torch.autocast(query.device.type, enabled=False):
        scores = torch.matmul(
            query * math.copysign(factor, scale), key.transpose(-2, -1) * factor
        )
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(
                ~mask, -math.inf
            )
        elif mask is not None:
            mask = _cast(mask, cast)
        scores = scores if mask is None else scores + mask
        weights: Tensor = aten._safe_softmax(scores, -1)
    return weights


def attended(weights: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Values weighed, in the type that attention gives them in."""
    value = _precise(value, _autocast(value))
    with torch.autocast(value.device.type, enabled=False):
        return torch.matmul(weights, value).to(dtype)


def _autocast(value: Tensor) -> torch.dtype | None:
    """The type that autocast has attention in, if it is on."""
    kind = value.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _cast(value: Tensor, cast: torch.dtype | None) -> Tensor:
    leaves = cast is None or value.dtype is torch.float64
    return value if leaves else value.to(cast)


def _precise(value: Tensor, cast: torch.dtype | None) -> Tensor:
    """A value as attention reads it: of 16 bits, in 32."""
    value = _cast(value, cast)
    coarse = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    return value.float() if value.dtype in HALVES and not coarse else value
