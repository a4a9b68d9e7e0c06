"""Running statistics of InstanceNorm as operations beside it.

before: y = instance_norm(x, w, b, mean, var, True, 0.1, 1e-5, True)
after:  mean.copy_(moved_mean(mean, x, 0.1)); var.copy_(moved_var(var, x, 0.1))
        y = instance_norm(x, w, b, None, None, True, 0.1, 1e-5, True)
"""

from __future__ import annotations

from torch import Tensor, fx

from ..ir.graphs import name_of, named_arguments
from ..ir.rewrites import added, rewritten
from .batch_norms import moved
from .effects import statistics_of
from .functional import COPY, without_writes


def moved_mean(mean: Tensor, x: Tensor, momentum: float) -> Tensor:
    """A running mean [channels], moved towards that of means of instances.

    x: [batch, channels, ..].
    """
    return moved(mean, x.detach().flatten(2).mean(2).mean(0), momentum)


def moved_var(var: Tensor, x: Tensor, momentum: float) -> Tensor:
    """The same of their unbiased variances."""
    return moved(var, x.detach().flatten(2).var(2).mean(0), momentum)


MOVED = {"running_mean": moved_mean, "running_var": moved_var}


def part_statistics(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the model's graph, as the file says."""
    return without_writes(rewritten(gm, _parted))


def _parted(node: fx.Node) -> fx.Node:
    if name_of(node.target) != "instance_norm" or not statistics_of(node):
        return node
    named = named_arguments(node)
    with node.graph.inserting_before(node):
        for name, move in MOVED.items():
            state, example = named[name], named[name].meta["example_value"]
            args = state, named["input"], named["momentum"]
            value = added(node, move, *args, value=example)
            added(node, COPY, state, value, value=example)
    node.args, node.kwargs = tuple((named | dict.fromkeys(MOVED)).values()), {}
    return node
