"""BatchNorm in training, of the whole batch.

"whole": it runs once, on all rows, with what lies between it and other BatchNorms.
"parts": microbatches go on, and only their means and variances are put together:

before: y = batch_norm(x, mean, var, w, b, True, 0.1, 1e-5)
after:  m = x.mean(dims); v = (x - m).square().mean(dims)
        learn(mean, var, count, m, v, x.numel(), 0.1)   # once, in a joint stage
        y = (x - m) * rsqrt(v + 1e-5) * w + b
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from ..ir.graphs import name_of, named_arguments
from ..ir.lazy import lazy_module
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from ..rows.kinds import Cause
from .graph_inputs import origin_of
from .returned_state import COUNT

Norms = Literal["microbatch", "parts", "whole"]
ONCE = "once"  # key of node.meta: runs for the whole batch alone
NORM = "norm"  # ... a BatchNorm that does, and what lies around it with it
COUNTS = "counts"  # of what adds to a count, which `learn` does too
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
    """A copy of the model's graph whose BatchNorms in training are of the whole batch.

    Raises PlanError for those whose statistics cannot be.
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    count = 0
    counting = set[fx.Node]().union(*map(_counting, gm.graph.nodes))
    for node in gm.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
        if node in counting:
            new[node].meta.update({COUNTS: True, ONCE: True})
        norm = _norm(new[node])
        if norm is None or not norm.training:
            continue
        count += 1
        _refuse_momentum(node, norm)
        if norms == "parts":
            new[node] = _written_out(graph, new[node], norm)
            continue
        new[node].meta.update({NORM: True, ONCE: True})
    for node in reversed(graph.nodes):
        if node.target is learn or NORM in node.meta:
            _refuse_reads(node)
        if norms == "parts" and COUNTS in node.meta:
            graph.erase_node(node)
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
    if name_of(node.target) != "batch_norm":
        return None
    named = named_arguments(node)
    return _Norm(*(named[name] for name in _Norm._fields))


def _written_out(graph: fx.Graph, node: fx.Node, norm: _Norm) -> fx.Node:
    """after: see the file. Takes a node's place."""

    def added(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        given = fx.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        value = target(*given[0], **given[1])
        new.meta.update(node.meta, example_value=value)
        return new

    example = norm.input.meta["example_value"]
    if example.dtype in (torch.float16, torch.bfloat16):
        raise PlanError(
            f"a BatchNorm of {example.dtype} has statistics of another type, which "
            f"microbatches can't put together{line_of(node.meta['stack_trace'])}\n"
            '  write batch_norm="microbatch" for it, or give it float32'
        )
    mul, reshape = aten.mul.Tensor, aten.reshape.default
    dims = [0, *range(2, example.dim())]
    shape = [1, -1, *[1] * (example.dim() - 2)]
    mean = added(aten.mean.dim, norm.input, dims, True)
    apart = added(aten.sub.Tensor, norm.input, mean)
    var = added(aten.mean.dim, added(aten.square.default, apart), dims, True)
    if norm.running_mean is not None:
        count = _count_beside(norm.running_mean)
        counted = count is not None and any(COUNTS in n.meta for n in count.users)
        state = norm.running_mean, norm.running_var, count if counted else None
        numbers = added(aten.sym_numel.default, norm.input)
        args = (*state, mean, var, numbers, norm.momentum)
        update = graph.call_function(learn, args)
        update.meta.update(node.meta, example_value=None, once=True)
    scale = added(aten.rsqrt.default, added(aten.add.Tensor, var, norm.eps))
    value = added(mul, apart, scale)
    if norm.weight is not None:
        value = added(mul, value, added(reshape, norm.weight, shape))
    if norm.bias is not None:
        value = added(aten.add.Tensor, value, added(reshape, norm.bias, shape))
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


def _counting(node: fx.Node) -> set[fx.Node]:
    """What adds to a count of calls, if that is all that is done with it."""
    norm = _norm(node)
    mean = norm.running_mean if norm is not None and norm.training else None
    state = _count_beside(mean) if mean is not None else None
    adds, queue = set[fx.Node](), [] if state is None else [state]
    while queue:
        new = set(queue.pop().users) - adds
        adds |= new
        queue += new
    plain = all(name_of(n.target) in ("add", "add_", "copy_") for n in adds)
    return adds if plain else set()


def _count_beside(mean: fx.Node) -> fx.Node | None:
    prefix = origin_of(mean).name.removesuffix("running_mean")
    inputs = mean.graph.find_nodes(op="placeholder")
    return next((n for n in inputs if origin_of(n).name == prefix + COUNT), None)


def _refuse_reads(norm: fx.Node) -> None:
    """Raises PlanError where others read what a norm writes: they would be in
    microbatches."""
    for state in filter(None, norm.args[:3] if norm.target is learn else _state(norm)):
        assert isinstance(state, fx.Node)
        for user in state.users:
            known = user.target is learn or NORM in user.meta or COUNTS in user.meta
            if not known:
                raise PlanError(
                    f'batch_norm="batch": {origin_of(state).name} is read besides'
                    f"{line_of(user.meta.get('stack_trace'))}\n  read it after the "
                    'call, or write batch_norm="microbatch"'
                )


def _state(node: fx.Node) -> list[fx.Node | None]:
    """What a BatchNorm writes: its statistics, and their count of calls."""
    norm = _norm(node)
    assert norm is not None
    if norm.running_mean is None:
        return []
    return [norm.running_mean, norm.running_var, _count_beside(norm.running_mean)]
