"""Running statistics of InstanceNorm as an operation beside it.

before: y = instance_norm(x, w, b, mean, var, True, 0.1, 1e-5, True)
after:  learn_instances(mean, var, x, 0.1)
        y = instance_norm(x, w, b, None, None, True, 0.1, 1e-5, True)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..ir.lazy import lazy_module

FUNCTIONAL = ("x", "mean", "var", "weight", "bias", "training", "momentum", "eps")
ATEN = ("x", "weight", "bias", "mean", "var", "training", "momentum", "eps", "cudnn")
NAMES = {"input": "x", "running_mean": "mean", "running_var": "var"}
NAMES |= {"use_input_stats": "training", "cudnn_enabled": "cudnn"}
OPERATORS = (F.instance_norm, torch.instance_norm, torch.ops.aten.instance_norm.default)


def learn_instances(mean: Tensor, var: Tensor, x: Tensor, momentum: float) -> None:
    """Moves running statistics towards the means of those of instances.

    x: [batch, channels, ..]. mean, var: [channels]; the variance is the unbiased one.
    """
    with torch.no_grad():
        each = x.flatten(2)
        mean.mul_(1 - momentum).add_(each.mean(2).mean(0), alpha=momentum)
        var.mul_(1 - momentum).add_(each.var(2).mean(0), alpha=momentum)


def part_statistics(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph, as the file says; the graph itself if it has none."""
    if not any(map(_learns, gm.graph.nodes)):
        return gm
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copy = new[node] = graph.node_copy(node, new.__getitem__)
        if _learns(copy):
            named = _arguments(copy)
            args = (named["mean"], named["var"], named["x"], named["momentum"])
            with graph.inserting_before(copy):
                learn = graph.call_function(learn_instances, args)
            learn.meta.update(node.meta, example_value=None)
            named.update(mean=None, var=None)
            copy.args, copy.kwargs = tuple(named.values()), {}
    result = lazy_module(gm, graph)
    result.meta.update(gm.meta)
    return result


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an InstanceNorm, in order."""
    functional = node.target is F.instance_norm
    kwargs = {NAMES.get(key, key): value for key, value in node.kwargs.items()}
    defaults = {"training": True, "momentum": 0.1, "eps": 1e-5}
    given = dict(zip(FUNCTIONAL if functional else ATEN, node.args, strict=False))
    every = {**defaults, **given, **kwargs}
    return {name: every.get(name) for name in (FUNCTIONAL if functional else ATEN)}


def _learns(node: fx.Node) -> bool:
    """Whether a node is an InstanceNorm in training that keeps statistics."""
    if node.target not in OPERATORS:
        return False
    named = _arguments(node)
    return named["mean"] is not None and bool(named["training"])
