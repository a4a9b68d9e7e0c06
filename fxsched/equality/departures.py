"""Where a model's values, or their gradients, on parts of a batch depart from those on
the whole of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..capture.graph_inputs import placeholders
from ..ir.facts import facts
from ..ir.graphs import named_arguments, tensors
from ..ir.meta import of_node
from ..placement.kinds import REPLICATE, Rows
from ..planning import TracedCall
from .draws import Numbers, WholeDraws
from .on_parts import OnParts, copied, joined

# what rounding may do to a value, as a part of its largest element
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2}
ROUNDING[torch.bfloat16] = 5e-2


class Departure(NamedTuple):
    """The first operation of the traced microbatch whose parts do not make up the
    whole. gradient: whether its backward does not."""

    node: fx.Node
    gradient: bool


def rounding(value: Tensor) -> float:
    """What rounding may change of a value, as a part of its largest element."""
    return ROUNDING.get(value.dtype, 0.0)


def first_departure(
    gm: fx.GraphModule, args: Sequence[Any], traced: TracedCall, numbers: Numbers
) -> Departure | None:
    """Runs the model's graph on the whole batch and the traced one on microbatches,
    with the same random numbers, and compares values and their gradients.

    Values that are the numbers of the rows are no departures.
    """
    whole, parts = _Whole(gm), OnParts(traced, list(map(copied, args)), numbers)
    with WholeDraws(numbers):
        outputs = whole.run(*map(copied, args))
    results = parts.run()
    pairs = [p for p in _pairs(gm, traced) if p[0] in parts.values and p[0].users]
    for node, source in pairs:
        rows = of_node(node).get("rows") or REPLICATE
        if not rows.numbers and not _same(whole.seen[source], parts.seen[node], rows):
            return Departure(node, False)
    wanted = _gradients(outputs, [[whole.values[source]] for _, source in pairs])
    whole_outputs = [_whole_output(traced, i, each) for i, each in enumerate(results)]
    found = _gradients(whole_outputs, [parts.values[node] for node, _ in pairs])
    least = max((_size(each) for (each,) in wanted), default=0.0) / 100
    triples = list(zip(pairs, wanted, found, strict=True))
    for (node, _), (gradient,), each in reversed(triples):
        rows = of_node(node).get("rows") or REPLICATE
        if not _gradients_same(gradient, each, rows, least):
            return Departure(_reader(node), True)
    return None


class _Whole(fx.Interpreter):
    """values: of each node that gives tensors; seen: as they were then."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[fx.Node, Any] = {}
        self.seen: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n], self.seen[n] = value, fx.node.map_aggregate(value, copied)
        return value


def _pairs(gm: fx.GraphModule, traced: TracedCall) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The traced nodes that are made of nodes of the model's graph as they are."""
    inputs = placeholders(gm)
    named = {node.name: node for node in gm.graph.nodes}
    for node in traced.graph.graph.nodes:
        if node.op == "placeholder" and of_node(node)["index"] < len(inputs):
            yield node, inputs[of_node(node)["index"]]
        source = named.get(of_node(node).get("source", ""))
        if source is not None and _place(source) == _place(node):
            yield node, source


def _place(node: fx.Node) -> tuple[Any, ...]:
    """Where an operation is, and which: a mean may have become a sum."""
    how = named_arguments(node).get("reduction")
    return node.target, node.meta.get("stack_trace"), how


def _same(whole: Any, parts: Sequence[Any], rows: Rows) -> bool:
    """Whether the parts of a node's tensors make up those of the whole batch."""
    values = zip(*map(tensors, parts), strict=True)
    pairs = zip(tensors(whole), values, strict=True)
    return all(_make_up(value, part, rows) for value, part in pairs)


def _whole_output(traced: TracedCall, position: int, parts: Sequence[Any]) -> Any:
    """What the user gets of an output; None where it has no gradient."""
    output = facts(traced.graph).outputs[position]
    if not output.differentiable or len(parts) == 1:
        return parts[0] if output.differentiable else None
    how = traced.request.loss_reduction if output.kind == "scalar" else output.how
    if output.kind == "rows":
        return joined(parts, "rows", output.dim or 0)
    return joined(parts, how, 0) if how in ("sum", "mean") else None


def _gradients(
    outputs: Sequence[Any], values: Sequence[Sequence[Any]]
) -> list[list[Tensor | None]]:
    """The gradients of values, of a sum of the outputs with weights of all sizes."""
    total = torch.zeros(())
    for each in outputs:
        if _learns(each):
            weights = torch.arange(each.numel(), device=each.device).cos()
            total = total + (each.flatten() * weights.to(each.dtype)).sum()
    asked = [each for group in values for each in group if _learns(each)]
    if not asked or not total.requires_grad:
        return [[None] * len(group) for group in values]
    found = iter(torch.autograd.grad(total, asked, allow_unused=True))
    return [[next(found) if _learns(e) else None for e in group] for group in values]


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _gradients_same(
    whole: Tensor | None, parts: Sequence[Tensor | None], rows: Rows, least: float
) -> bool:
    """Whether gradients of parts make up the whole's: rows side by side, or, of what
    all have, added up.

    least: what rounding is measured against at the least.
    """
    known = [part for part in parts if part is not None]
    if whole is None or not known:
        some = [whole] if whole is not None else known
        return all(_size(each) <= rounding(each) * least for each in some)
    full = [torch.zeros_like(known[0]) if part is None else part for part in parts]
    return _make_up(whole, full, rows, least)


def _reader(node: fx.Node) -> fx.Node:
    """The operation whose backward gives a node's gradient: a hook or a function of the
    user's own, if there is one."""
    users = [user for user in node.users if user.op != "output"] or [node]
    after = [*users, *(each for user in users for each in user.users)]
    hooks = [each for each in after if "register_hook" in str(each.target)]
    own = [user for user in users if "autograd_function" in str(user.target)]
    return (hooks or own or users)[0]


def _make_up(
    whole: Tensor, parts: Sequence[Tensor], rows: Rows, least: float = 0.0
) -> bool:
    """Whether parts, side by side, or all the same, or added up, or their mean, are
    the whole."""
    first = parts[0]
    if first.shape == whole.shape:
        if all(_close(part, whole, least) for part in parts):
            return True
        if not whole.is_floating_point():
            return _close(sum(parts, torch.zeros_like(whole)), whole)
        total = torch.stack(list(parts)).sum(0)
        return _close(total, whole, least) or _close(total / len(parts), whole, least)
    if first.dim() != whole.dim():
        return False
    dims = [i for i in range(whole.dim()) if first.shape[i] != whole.shape[i]]
    if len(dims) != 1 or len(parts) * first.shape[dims[0]] != whole.shape[dims[0]]:
        return False
    dim = dims[0]
    outer = rows.outer if rows.dim == dim else 1
    shape = [*first.shape[:dim], outer, -1, *first.shape[dim + 1 :]]
    blocks = [part.reshape(shape) for part in parts]
    return _close(torch.cat(blocks, dim + 1).flatten(dim, dim + 1), whole, least)


def _size(value: Tensor | None) -> float:
    """The largest element, without its sign."""
    if value is None or not value.numel():
        return 0.0
    return float(value.detach().abs().nan_to_num().max())


def _close(value: Tensor, whole: Tensor, least: float = 0.0) -> bool:
    if not whole.is_floating_point():
        return bool(torch.equal(value, whole))
    allowed = rounding(whole) * max(_size(whole), least)
    return bool(torch.allclose(value, whole, 0.0, allowed + 1e-12, equal_nan=True))
