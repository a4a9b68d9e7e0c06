"""BatchNorm in training, of the whole batch, and statistics of InstanceNorm.

"whole": it runs once, on all rows, with what lies between it and other BatchNorms.
"parts": microbatches go on, and only their means and variances are put together:

before: y = batch_norm(x, mean, var, w, b, True, 0.1, 1e-5)
after:  m = x.mean(dims); v = (x - m).square().mean(dims)
        mean_1 = moved(mean, m, 0.1)                    # once, in a global-batch stage
        var_1 = moved(var, unbiased(v, x.numel()), 0.1)
        y = (x - m) * rsqrt(v + 1e-5) * w + b; copy_(mean, mean_1); copy_(var, var_1)
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from ..ir.graphs import name_of, named_arguments
from ..ir.rewrites import added, rewritten
from ..ir.statistics import moved, moved_mean, moved_var, unbiased
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from ..placement.kinds import Cause
from .effects import statistics_of
from .functional import COPY, without_writes

Norms = Literal["microbatch", "parts", "whole"]
ONCE = "once"  # key of node.meta: runs for the whole batch alone
NORM = "norm"  # ... a BatchNorm that does, and what lies around it with it
aten = torch.ops.aten


class _Norm(NamedTuple):
    input: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    running_mean: fx.Node | None
    running_var: fx.Node | None
    training: bool
    momentum: Any
    eps: float


def whole_batch_norms(gm: fx.GraphModule, norms: Norms) -> fx.GraphModule:
    """A copy of the model's graph whose BatchNorms in training are of the whole batch,
    and have new versions of their statistics.

    Raises PlanError for those whose statistics cannot be.
    """
    found = []

    def write(node: fx.Node) -> fx.Node:
        norm = _norm(node)
        if norm is None or not norm.training:
            return node
        found.append(node)
        _refuse_momentum(node, norm)
        if norms == "parts":
            return _written_out(node, norm)
        node.meta.update({NORM: True, ONCE: True})
        return node

    result = rewritten(gm, write)
    result.meta["norms"] = len(found)
    return without_writes(result)


def refuse_microbatch(cause: Cause) -> None:
    """Raises PlanError for a BatchNorm that is written in a way not known here."""
    raise PlanError(
        f'batch_norm="batch": fxsched doesn\'t recognise {cause.operation} as a '
        f"BatchNorm{line_of(cause.stack)}\n  call torch.nn.functional.batch_norm there"
    )


def refuse_kept(gm: fx.GraphModule) -> None:
    """Raises PlanError for such norms in a model that keeps what microbatches leave."""
    for update in gm.graph.nodes:
        if ONCE in update.meta:
            raise PlanError(
                'batch_norm="batch": the model also writes a value that it computes '
                "from the batch into its own state, once for each "
                f"microbatch{line_of(update.meta.get('stack_trace'))}\n  compute the "
                'value after the call, or write batch_norm="microbatch"'
            )


def _norm(node: fx.Node) -> _Norm | None:
    if name_of(node.target) != "batch_norm":
        return None
    named = named_arguments(node)
    return _Norm(*(named[name] for name in _Norm._fields))


def _written_out(node: fx.Node, norm: _Norm) -> fx.Node:
    """after: see the file. Takes a node's place."""

    def new(target: Any, *args: Any) -> fx.Node:
        given = fx.map_arg(args, lambda n: n.meta["example_value"])
        return added(node, target, *args, value=target(*given))

    def once(target: Any, *args: Any) -> fx.Node:
        made = new(target, *args)
        made.meta[ONCE] = True
        return made

    example = norm.input.meta["example_value"]
    if example.dtype in (torch.float16, torch.bfloat16):
        raise PlanError(
            f"a BatchNorm whose input is {example.dtype} has statistics of another "
            "type, and fxsched can't combine those of the "
            f"microbatches{line_of(node.meta['stack_trace'])}\n  write "
            'batch_norm="microbatch", or give the BatchNorm an input in float32'
        )
    mul, reshape = aten.mul.Tensor, aten.reshape.default
    dims = [0, *range(2, example.dim())]
    shape = [1, -1, *[1] * (example.dim() - 2)]
    mean = new(aten.mean.dim, norm.input, dims, True)
    apart = new(aten.sub.Tensor, norm.input, mean)
    var = new(aten.mean.dim, new(aten.square.default, apart), dims, True)
    if norm.running_mean is not None and norm.running_var is not None:
        numbers = new(aten.sym_numel.default, norm.input)
        kept = once(unbiased, var, numbers)
        for state, value in ((norm.running_mean, mean), (norm.running_var, kept)):
            once(COPY, state, once(moved, state, value, norm.momentum))
    scale = new(aten.rsqrt.default, new(aten.add.Tensor, var, norm.eps))
    value = new(mul, apart, scale)
    if norm.weight is not None:
        value = new(mul, value, new(reshape, norm.weight, shape))
    if norm.bias is not None:
        value = new(aten.add.Tensor, value, new(reshape, norm.bias, shape))
    node.graph.erase_node(node)
    return value


def _refuse_momentum(node: fx.Node, norm: _Norm) -> None:
    """Raises PlanError for a BatchNorm whose momentum follows its count of calls."""
    if isinstance(norm.momentum, fx.Node) or norm.momentum is None:
        raise PlanError(
            'batch_norm="batch": a BatchNorm with momentum=None averages over its '
            "calls, and each microbatch would count as a "
            f"call{line_of(node.meta['stack_trace'])}\n  write "
            'batch_norm="microbatch" for it, or give the BatchNorm a momentum'
        )


MOVED = {"running_mean": moved_mean, "running_var": moved_var}


def part_statistics(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the model's graph, with operations for statistics of InstanceNorm.

    before: y = instance_norm(x, w, b, mean, var, True, 0.1, 1e-5, True)
    after:  mean.copy_(moved_mean(mean, x, 0.1)); var.copy_(moved_var(var, x, 0.1))
            y = instance_norm(x, w, b, None, None, True, 0.1, 1e-5, True)
    """
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
