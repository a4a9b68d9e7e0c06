"""BatchNorm in training, of the whole batch.

"whole": it runs once, on all rows, with what lies between it and other BatchNorms.
"parts": microbatches go on, and only their means and variances are put together:

before: y = batch_norm(x, mean, var, w, b, True, 0.1, 1e-5)
after:  m = x.mean(dims); v = (x - m).square().mean(dims)
        learn(mean, var, count, m, v, x.numel(), 0.1)   # once, in a joint stage
        y = (x - m) * rsqrt(v + 1e-5) * w + b
"""

from __future__ import annotations

import operator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..ir.lazy import lazy_module
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from ..rows.kinds import Cause
from .graph_inputs import origin_of

Norms = Literal["microbatch", "parts", "whole"]
ONCE = "once"  # key of node.meta: runs for the whole batch alone
NORM = "norm"  # ... a BatchNorm that does, and what lies around it with it
COUNTS = "counts"  # of what adds to a count, which `learn` does too
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


def whole_batch_norms(gm: fx.GraphModule, norms: Norms) -> fx.GraphModule:
    """A copy of Dynamo's graph whose BatchNorms in training are of the whole batch.

    Raises PlanError for those whose statistics cannot be.
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    count = 0
    for node in gm.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
        norm = _norm(new[node])
        if norm is None or not norm.training:
            continue
        count += 1
        _refuse_momentum(node, norm)
        if norms == "parts":
            new[node] = _written_out(graph, new[node], norm)
        else:
            _run_once(new[node], norm)
    for node in [n for n in graph.nodes if n.target is learn or NORM in n.meta]:
        _settle_state(node)
    result = lazy_module(gm, graph)
    result.meta.update(gm.meta, norms=count)
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
                '  compute it after the call, or write batch_norm="microbatch"'
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


def _run_once(node: fx.Node, norm: _Norm) -> None:
    """Marks a norm, and calls what has no least number of rows: microbatches of one row
    are traced too."""
    node.target = torch.batch_norm
    values = (*(getattr(norm, name) for name in ATEN), torch.backends.cudnn.enabled)
    node.args, node.kwargs = values, {}
    node.meta.update({NORM: True, ONCE: True})
    if norm.mean is not None:
        _count(norm.mean)


def _written_out(graph: fx.Graph, node: fx.Node, norm: _Norm) -> fx.Node:
    """after: see the file. Takes a node's place."""

    def added(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        given = fx.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        value = target(*given[0], **given[1])
        new.meta.update(node.meta, example_value=value)
        return new

    example = norm.x.meta["example_value"]
    if example.dtype in (torch.float16, torch.bfloat16):
        raise PlanError(
            f"a BatchNorm of {example.dtype} has statistics of another type, which "
            f"microbatches can't put together{line_of(node.meta['stack_trace'])}\n"
            '  write batch_norm="microbatch" for it, or give it float32'
        )
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


def _refuse_momentum(node: fx.Node, norm: _Norm) -> None:
    """Raises PlanError for a BatchNorm whose momentum follows its count of calls."""
    if isinstance(norm.momentum, fx.Node) or norm.momentum is None:
        raise PlanError(
            'batch_norm="batch": a BatchNorm with momentum=None counts calls'
            f"{line_of(node.meta['stack_trace'])}\n"
            '  write batch_norm="microbatch" for it, or give it a momentum'
        )


def _count(mean: fx.Node) -> fx.Node | None:
    """The count of calls, if the model adds to it; what does is marked."""
    state = _count_beside(mean)
    users = state.users if state is not None else ()
    adds = [n for n in users if n.target in ADDS and COUNTS not in n.meta]
    for add in adds:
        add.meta[COUNTS] = add.meta[ONCE] = True
    return state if adds else None


def _count_beside(mean: fx.Node) -> fx.Node | None:
    prefix = origin_of(mean).name.removesuffix("running_mean")
    inputs = mean.graph.find_nodes(op="placeholder")
    return next((n for n in inputs if origin_of(n).name == prefix + COUNT), None)


def _settle_state(norm: fx.Node) -> None:
    """Erases what adds to a count that `learn` adds to. Raises PlanError where others
    read what a norm writes: they would be in microbatches."""
    states = norm.args[:3] if norm.target is learn else _state(norm)
    for state in filter(None, states):
        assert isinstance(state, fx.Node)
        for user in list(state.users):
            if user.target is learn or NORM in user.meta:
                continue
            if COUNTS not in user.meta or user.users:
                raise PlanError(
                    f'batch_norm="batch": {origin_of(state).name} is read besides'
                    f"{line_of(user.meta.get('stack_trace'))}\n  read it after the "
                    'call, or write batch_norm="microbatch"'
                )
            if norm.target is learn:
                norm.graph.erase_node(user)


def _state(node: fx.Node) -> list[fx.Node | None]:
    """What a BatchNorm writes: its statistics, and their count of calls."""
    norm = _norm(node)
    assert norm is not None
    if norm.mean is None:
        return []
    return [norm.mean, norm.var, _count_beside(norm.mean)]
