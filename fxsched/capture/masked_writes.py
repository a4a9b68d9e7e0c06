"""x[mask] = value, where the value is one for all that the mask picks, as torch.where.

before: h[mask] = row                                       # index_put_, h [batch, 32]
after:  picked = unsqueeze(mask, 1); copy_(h, where(picked, row, h))

So rows of the batch don't meet. Values that differ from row to row stay index_put, see
chosen_rows.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..ir.rewrites import added, rewritten
from ..ir.written import written

aten = torch.ops.aten
PUTS = (aten.index_put.default, aten.index_put_.default)


def fill_by_mask(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph, as the file says; itself if it has nothing of the kind."""
    return rewritten(gm, _filled) if any(map(has_mask, gm.graph.nodes)) else gm


def has_mask(node: fx.Node) -> bool:
    """Whether an index_put, in place or not, or as a view is written, has a mask among
    its indices."""
    indices: Any = node.args[1] if node.target in PUTS else ()
    if node.target is written and node.args[0] in PUTS:
        indices = node.args[1]["indices"]  # type: ignore[index, call-overload]
    return any(getattr(_value(i), "dtype", None) is torch.bool for i in indices if i)


def _filled(node: fx.Node) -> fx.Node:
    """A node, or what takes its place."""
    if not has_mask(node):
        return node
    args: Any = node.args
    tensor, (*before, mask), values, *accumulate = args
    rest = _value(tensor).dim() - len(before) - _value(mask).dim()  # dimensions
    count, value = _value(values).dim() - rest, _value(values)
    one = count < 1 or (count == 1 and statically_known_true(value.shape[0] == 1))
    if not one or any(before) or any(accumulate) or node.kwargs:
        return node
    with node.graph.inserting_before(node):
        for _ in range(rest):
            mask = _call(node, aten.unsqueeze.default, mask, -1)
        args = mask, values, tensor
        if node.target is PUTS[0]:
            node.target, node.args = aten.where.self, args
        else:
            node.target = aten.copy_.default
            node.args = tensor, _call(node, aten.where.self, *args)
    return node


def _call(like: fx.Node, target: Any, *args: Any) -> fx.Node:
    return added(like, target, *args, value=target(*fx.map_arg(args, _value)))


def _value(node: Any) -> Any:
    return node.meta.get("example_value")
