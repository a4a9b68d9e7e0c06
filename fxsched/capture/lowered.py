"""Dynamo's graph in aten operations, before autograd: composites stay whole.

before: h = linear(x, w); h[:, 0] = 0; y = h.view(len(x), -1)
after:  h = aten.linear(x, w); h0 = aten.select(h, 1, 0); aten.fill_(h0, 0)
        y = aten.view(h, [s0, -1])

What has a body of its own stays as Dynamo has it: a torch.autograd.Function, a hook, a
function that is mapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree

from ..ir.lazy import lazy_module
from ..rows.own_backward import own_name
from .graph_inputs import placeholders

aten = torch.ops.aten
KEPT = ("module", "stack_trace", "recompute")  # of node.meta
UNREAD = (aten.sym_size.int, torch.tensor)  # do nothing that nobody reads


def lowered(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph in aten operations; sizes of the batch are symbols in both.

    What a node of Dynamo's comes to ends in one that has its name, which is often the
    user's for it.
    """
    inputs = placeholders(gm)
    values = [node.meta.get("example_value") for node in inputs]
    lowering = _Lowering(gm)
    with _as_before(values):
        traced: fx.GraphModule = make_fx(lowering.run, pre_dispatch=True)(*values)
    for old, node in zip(inputs, placeholders(traced), strict=True):
        node.meta, lowering.names[node] = dict(old.meta), old.name
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in traced.graph.nodes:
        if node.target is aten.lift_fresh_copy.default:
            _write_out(traced, node)
        node.name = lowering.names.get(node, node.name)
        new[node] = graph.node_copy(node, new.__getitem__)
        if node.op == "output":
            new[node].meta = dict(gm.graph.output_node().meta)
        elif node.op != "placeholder":
            new[node].meta["example_value"] = new[node].meta.pop("val", None)
    for node in reversed(graph.nodes):
        if not node.users and (node.op == "get_attr" or node.target in UNREAD):
            graph.erase_node(node)
    result = lazy_module(traced, graph)
    result.meta.update(gm.meta)
    return result


def _write_out(gm: fx.GraphModule, node: fx.Node) -> None:
    """Writes a constant out, as the model's code does."""
    constant: Tensor = getattr(gm, str(node.args[0].target))  # type: ignore[union-attr]
    if constant.dim() == 0:
        for user in list(node.users):
            if user.target is aten.fill_.Tensor:
                user.target = aten.fill_.Scalar
                user.args = (user.args[0], constant.item())
    node.target, node.args = torch.tensor, (constant.tolist(),)
    node.kwargs = {"dtype": constant.dtype}


@contextmanager
def _as_before(values: list[Any]) -> Iterator[None]:
    """Puts back what tracing changes. Constants of the graph are no fake tensors."""
    fakes = [value for value in values if isinstance(value, Tensor)]
    mode: Any = fakes[0].fake_mode  # type: ignore[attr-defined]
    training, allowed = torch.is_grad_enabled(), mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        with mode:
            yield
    finally:
        torch._C._set_grad_enabled(training)
        mode.allow_non_fake_inputs = allowed


class _Lowering(fx.Interpreter):
    """Runs a graph while it is traced; new nodes learn what is known of old ones."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.names: dict[fx.Node, str] = {}  # of new nodes, as Dynamo has them

    def run_node(self, node: fx.Node) -> Any:
        graph = self._tracer().graph
        last = next(iter(reversed(graph.nodes)))
        known = isinstance(node.target, HigherOrderOperator) or node.target is F.linear
        value = self._kept(node) if known else super().run_node(node)
        new = last.next
        made = node.op not in ("placeholder", "output") and new.op != "root"
        while made and new.op != "root":
            known = {key: node.meta[key] for key in KEPT if key in node.meta}
            new.meta.update({"module": "", **known})
            last = new
            new = new.next
        if made:
            self.names[last] = node.name
        return value

    def _tracer(self) -> Any:
        mode = get_proxy_mode()
        assert mode is not None, "it runs while it is traced"
        return mode.tracer

    def _kept(self, node: fx.Node) -> Any:
        """Copies a node as it is; its value is Dynamo's.

        Linear layers too: to run one on symbols takes a hundred times as long.
        """
        tracer = self._tracer()
        args, kwargs = self.fetch_args_kwargs_from_env(node)

        def proxied(value: Any) -> Any:
            if not isinstance(value, fx.GraphModule):
                return tracer.unwrap_proxy(value)
            value = lowered(value) if own_name(node) is not None else value
            name = f"body_{len(tracer.graph.nodes)}"
            setattr(tracer.root, name, value)
            return tracer.create_proxy("get_attr", name, (), {})

        args, kwargs = pytree.tree_map(proxied, (tuple(args), dict(kwargs)))
        target = aten.linear.default if node.target is F.linear else node.target
        proxy = tracer.create_proxy("call_function", target, args, kwargs)
        value = node.meta["example_value"]
        return track_tensor_tree(value, proxy, constant=None, tracer=tracer)
