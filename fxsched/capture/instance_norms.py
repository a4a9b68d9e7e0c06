"""Running statistics of InstanceNorm as operations beside it.

before: y = instance_norm(x, w, b, mean, var, True, 0.1, 1e-5, True)
after:  mean.copy_(moved_mean(mean, x, 0.1)); var.copy_(moved_var(var, x, 0.1))
        y = instance_norm(x, w, b, None, None, True, 0.1, 1e-5, True)
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ..ir.graphs import name_of, named_arguments
from ..ir.lazy import lazy_module
from .effects import statistics_of
from .functional import without_writes


def moved_mean(mean: Tensor, x: Tensor, momentum: float) -> Tensor:
    """A running mean [channels], moved towards that of means of instances.

    x: [batch, channels, ..].
    """
    with torch.no_grad():
        new = x.flatten(2).mean(2).mean(0)
        return mean.mul(1 - momentum).add(new, alpha=momentum)


def moved_var(var: Tensor, x: Tensor, momentum: float) -> Tensor:
    """The same of their unbiased variances."""
    with torch.no_grad():
        new = x.flatten(2).var(2).mean(0)
        return var.mul(1 - momentum).add(new, alpha=momentum)


def part_statistics(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the model's graph, as the file says; itself if it has none."""
    if not any(map(_learns, gm.graph.nodes)):
        return gm
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copy = new[node] = graph.node_copy(node, new.__getitem__)
        if _learns(copy):
            named = named_arguments(copy)
            with graph.inserting_before(copy):
                for name, moved in MOVED.items():
                    args = named[name], named["input"], named["momentum"]
                    value = graph.call_function(moved, args)
                    write = graph.call_function(COPY, (named[name], value))
                    for each in (value, write):
                        each.meta = {**node.meta}
                        each.meta["example_value"] = named[name].meta["example_value"]
            named.update(dict.fromkeys(MOVED))
            copy.args, copy.kwargs = tuple(named.values()), {}
    result = lazy_module(gm, graph)
    result.meta.update(gm.meta)
    return without_writes(result)


MOVED = {"running_mean": moved_mean, "running_var": moved_var}
COPY = torch.ops.aten.copy_.default


def _learns(node: fx.Node) -> bool:
    """Whether a node is an InstanceNorm in training that keeps statistics."""
    return name_of(node.target) == "instance_norm" and bool(statistics_of(node))
