"""Running statistics of InstanceNorm as an operation beside it.

before: y = instance_norm(x, w, b, mean, var, True, 0.1, 1e-5, True)
after:  learn_instances(mean, var, x, 0.1)
        y = instance_norm(x, w, b, None, None, True, 0.1, 1e-5, True)
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ..ir.graphs import name_of, named_arguments
from ..ir.lazy import lazy_module

INSTANCE_NORM = "instance_norm"


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
            named = named_arguments(copy)
            read = ("running_mean", "running_var", "input", "momentum")
            args = tuple(named[name] for name in read)
            with graph.inserting_before(copy):
                learn = graph.call_function(learn_instances, args)
            learn.meta.update(node.meta, example_value=None)
            named.update(running_mean=None, running_var=None)
            copy.args, copy.kwargs = tuple(named.values()), {}
    result = lazy_module(gm, graph)
    result.meta.update(gm.meta)
    return result


def _learns(node: fx.Node) -> bool:
    """Whether a node is an InstanceNorm in training that keeps statistics."""
    if name_of(node.target) != INSTANCE_NORM:
        return False
    named = named_arguments(node)
    return named["running_mean"] is not None and bool(named["use_input_stats"])
