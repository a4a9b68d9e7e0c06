"""BatchNorm in training, of the whole batch, as operations whose rows can be followed.

before: y = batch_norm(x, mean, var, w, b, True, 0.1, 1e-5)
after:  m = x.mean(dims); v = (x - m).square().mean(dims)
        learn(mean, var, count, m, v, x.numel(), 0.1)   # once, in a joint stage
        y = (x - m) * rsqrt(v + 1e-5) * w + b
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..ir.lazy import lazy_module
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from ..rows.kinds import Cause
from .graph_inputs import origin_of

ONCE = "once"  # key of node.meta: runs for the whole batch alone
DROPPED = "dropped"  # of what adds to a count, which `learn` does too
COUNT = "num_batches_tracked"
FUNCTIONAL = ("x", "mean", "var", "weight", "bias", "training", "momentum", "eps")
ATEN = ("x", "weight", "bias", "mean", "var", "training", "momentum", "eps")
OPERATORS = (torch.batch_norm, torch.ops.aten.batch_norm.default)
ADDS = ("add_", operator.iadd, torch.ops.aten.add_.Tensor)
NAMES = {"input": "x", "running_mean": "mean", "running_var": "var"}
DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1}


class _Norm(NamedTuple):
    x: fx.Node
    mean: fx.Node | None
    var: fx.Node | None
    weight: fx.Node | None
    bias: fx.Node | None
    training: bool
    momentum: Any
    eps: float


def learn(
    running_mean: Tensor,
    running_var: Tensor,
    count: Tensor | None,
    mean: Tensor,
    var: Tensor,
    numbers: int,
    momentum: float,
) -> None:
    """Moves running statistics towards those of a batch: [channels] each.

    numbers: in the batch; the variance that is kept is the unbiased one.
    """
    with torch.no_grad():
        each = numbers // running_mean.numel()
        unbiased = var.flatten() * (each / max(each - 1, 1))
        running_mean.mul_(1 - momentum).add_(mean.flatten(), alpha=momentum)
        running_var.mul_(1 - momentum).add_(unbiased, alpha=momentum)
        if count is not None:
            count.add_(1)


def whole_batch_norms(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph whose BatchNorms in training are of the whole batch.

    Raises PlanError for those whose statistics cannot be.
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
        norm = _norm(new[node])
        if norm is not None and norm.training:
            new[node] = _written_out(graph, new[node], norm)
    _drop_counts(graph)
    result = lazy_module(gm, graph)
    result.meta.update(gm.meta)
    return result


def refuse_microbatch(cause: Cause) -> None:
    """Raises PlanError for a BatchNorm that is written in a way not known here."""
    raise PlanError(
        f'batch_norm="batch": {cause.operation} is not known as BatchNorm'
        f"{line_of(cause.stack)}\n  call torch.nn.functional.batch_norm there"
    )


def refuse_kept(gm: fx.GraphModule) -> None:
    """Raises PlanError for such norms in a model that keeps what microbatches leave."""
    for update in gm.graph.nodes:
        if ONCE in update.meta:
            raise PlanError(
                'batch_norm="batch": the model also keeps, in its own state, what it '
                "computes of the batch, which goes from microbatch to microbatch"
                f"{line_of(update.meta.get('stack_trace'))}\n"
                '  compute it after the call, or leave batch_norm="microbatch"'
            )


def _norm(node: fx.Node) -> _Norm | None:
    if node.target is not F.batch_norm and node.target not in OPERATORS:
        return None
    names = FUNCTIONAL if node.target is F.batch_norm else ATEN
    named = {NAMES.get(k, k): v for k, v in node.kwargs.items()}
    every: dict[str, Any] = {
        **DEFAULTS,
        "eps": 1e-5,
        **named,
        **dict(zip(names, node.args, strict=False)),
    }
    return _Norm(**{name: every[name] for name in _Norm._fields})


def _written_out(graph: fx.Graph, node: fx.Node, norm: _Norm) -> fx.Node:
    """after: see the file. Takes a node's place."""

    def added(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        given = fx.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        value = target(*given[0], **given[1])
        new.meta.update(node.meta, example_value=value)
        return new

    example = norm.x.meta["example_value"]
    _refuse(node, norm, example)
    dims = [0, *range(2, example.dim())]
    shape = [1, -1, *[1] * (example.dim() - 2)]
    mean = added(torch.mean, norm.x, dims, True)
    apart = added(torch.sub, norm.x, mean)
    var = added(torch.mean, added(torch.square, apart), dims, True)
    if norm.mean is not None:
        numbers = added(torch.numel, norm.x)
        args = norm.mean, norm.var, _count(norm.mean), mean, var, numbers
        update = graph.call_function(learn, (*args, norm.momentum))
        update.meta.update(node.meta, example_value=None, once=True)
    scale = added(torch.rsqrt, added(torch.add, var, norm.eps))
    value = added(torch.mul, apart, scale)
    if norm.weight is not None:
        value = added(torch.mul, value, added(torch.reshape, norm.weight, shape))
    if norm.bias is not None:
        value = added(torch.add, value, added(torch.reshape, norm.bias, shape))
    graph.erase_node(node)
    return value


def _refuse(node: fx.Node, norm: _Norm, example: Tensor) -> None:
    """Raises PlanError for BatchNorms that are not computed so."""
    why = None
    if isinstance(norm.momentum, fx.Node) or norm.momentum is None:
        why = "with momentum=None counts calls"
    elif example.dtype in (torch.float16, torch.bfloat16):
        why = f"of {example.dtype} has statistics of another type"
    if why is not None:
        raise PlanError(
            f'batch_norm="batch": a BatchNorm {why}{line_of(node.meta["stack_trace"])}'
            '\n  leave batch_norm="microbatch" for it, or give it a momentum and '
            "float32"
        )


def _count(mean: fx.Node) -> fx.Node | None:
    """The count of calls, if the model adds to it; that is marked to be dropped."""
    prefix = origin_of(mean).name.removesuffix("running_mean")
    for state in mean.graph.find_nodes(op="placeholder"):
        if origin_of(state).name == prefix + COUNT:
            adds = [
                n for n in state.users if n.target in ADDS and DROPPED not in n.meta
            ]
            for add in adds:
                add.meta[DROPPED] = True
            return state if adds else None
    return None


def _drop_counts(graph: fx.Graph) -> None:
    """Erases what `learn` counts itself. Raises PlanError where others read what it
    writes: they would be in microbatches."""
    for update in graph.find_nodes(op="call_function", target=learn):
        for state in filter(None, update.args[:3]):
            assert isinstance(state, fx.Node)
            users = [user for user in state.users if user.target is not learn]
            for user in users:
                if DROPPED not in user.meta or user.users:
                    raise PlanError(
                        f'batch_norm="batch": {origin_of(state).name} is read besides'
                        f"{line_of(user.meta.get('stack_trace'))}\n  read it after the "
                        'call, or leave batch_norm="microbatch"'
                    )
                graph.erase_node(user)
