"""Nodes of torch.export's graphs as Dynamo would have them.

Regions of autocast and without gradients are pairs of nodes, calls are those that a
model's code has, and nodes know the modules that they were called in.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ..ir.graphs import REGION_ENTERS, REGION_EXITS
from ..ir.lazy import lazy_module
from .graph_inputs import placeholders
from .spoken import Spoken

ROOT = "model"  # what the model is called inside of what is exported
GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled
AUTOCAST = torch.ops.higher_order.wrap_with_autocast
CALLED_AGAIN = re.compile(r"@\d+")


class Nodes:
    """Those that were made so far, and the graph that they are in."""

    def __init__(self) -> None:
        self.graph, self.root = fx.Graph(), dict[str, Any]()
        self.new: dict[fx.Node, Any] = {}
        self.gradients = torch.is_grad_enabled()

    def input(self, node: fx.Node, **meta: object) -> None:
        """Makes an input of one."""
        new = self.new[node] = self.graph.placeholder(node.name)
        self._note(node, new)
        new.meta.update(meta)

    def module(self, outputs: tuple[Any, ...]) -> fx.GraphModule:
        """The graph's, with these outputs, and without what nobody reads."""
        self.graph.output(outputs)
        for node in reversed(list(self.graph.nodes)):
            if not node.users and _needless(node):
                self.graph.erase_node(node)
        return lazy_module(self.root, self.graph)

    def _note(self, node: fx.Node, new: fx.Node) -> None:
        """What Dynamo notes of a node."""
        new.meta = {
            "example_value": node.meta.get("val"),
            "stack_trace": node.meta.get("stack_trace"),
            "module": _module_of(node),
        }

    def body(self, gm: fx.GraphModule) -> tuple[Any, ...]:
        """Makes those of a graph, whose inputs are there; gives what it returns."""
        for node in gm.graph.nodes:
            if node in self.new or node.op == "placeholder":
                continue
            if node.op == "output":
                returned: Any = fx.map_arg(node.args[0], self.new.__getitem__)
                return tuple(returned)
            if node.op == "get_attr":
                self._constant(gm, node)
            elif node.target in (GRADIENTS, AUTOCAST):
                self._region(gm, node)
            elif node.target is operator.getitem and isinstance(
                self.new.get(node.args[0]), tuple
            ):
                self.new[node] = self.new[node.args[0]][node.args[1]]
            else:
                self._call(node)
        raise AssertionError("a graph without an output")

    def _constant(self, gm: fx.GraphModule, node: fx.Node) -> None:
        value = operator.attrgetter(str(node.target))(gm)
        if isinstance(value, fx.GraphModule):  # a region's, told where it is called
            return
        name = f"constant_{len(self.root)}"
        self.root[name] = value
        self.new[node] = self.graph.get_attr(name)
        self._note(node, self.new[node])

    def _call(self, node: fx.Node) -> None:
        spoken = Spoken(node)
        args = fx.map_arg(tuple(spoken.args), self.new.__getitem__)
        kwargs = fx.map_arg(dict(spoken.kwargs), self.new.__getitem__)
        new = self.graph.create_node(spoken.op, spoken.target, args, kwargs)
        self._note(node, new)
        self.new[node] = new

    def _region(self, gm: fx.GraphModule, node: fx.Node) -> None:
        """A region of autocast or without gradients, between its enter and exit.

        before: y = wrap_with_set_grad_enabled(False, body, x)[0]
        after:  _set_grad_enabled(False); y = mul(x, 2); _set_grad_enabled(True)
        """
        at = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node))
        body, settings = node.args[at], node.args[:at]
        assert isinstance(body, fx.Node)
        inner = operator.attrgetter(str(body.target))(gm)
        before = self.gradients
        if node.target is GRADIENTS:
            self.gradients = bool(settings[0])
            self._mark(node, torch._C._set_grad_enabled, settings)
        else:
            enter = torch.amp.autocast_mode._enter_autocast
            entered = self._mark(node, enter, settings)
        values = fx.map_arg(node.args[at + 1 :], self.new.__getitem__)
        self.new.update(zip(placeholders(inner), values, strict=True))
        self.new[node] = self.body(inner)
        if node.target is GRADIENTS:
            self.gradients = before
            self._mark(node, torch._C._set_grad_enabled, (before,))
        else:
            self._mark(node, torch.amp.autocast_mode._exit_autocast, (entered,))

    def _mark(self, node: fx.Node, target: Callable[..., Any], args: Any) -> fx.Node:
        new = self.graph.call_function(target, tuple(args))
        new.meta = {
            "example_value": None,
            "stack_trace": node.meta.get("stack_trace"),
            "module": _module_of(node),
        }
        return new


def _needless(node: fx.Node) -> bool:
    """Whether a node that nobody reads does nothing: a row of a batch that stayed
    whole, a check of values (microbatches have others), what only such read."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        return node.target not in (*REGION_ENTERS, *REGION_EXITS)
    if node.target._schema.name.removeprefix("aten::").startswith("_assert"):
        return True
    tags = node.target.tags
    return not (
        node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in tags
    )


def _module_of(node: fx.Node) -> str:
    """The dotted name of the innermost module that a node was called in, or ''."""
    stack: Mapping[str, tuple[Any, ...]] = node.meta.get("nn_module_stack") or {}
    for path, *_ in reversed(list(stack.values())):
        name = CALLED_AGAIN.sub("", str(path))
        if name == ROOT or name.startswith(f"{ROOT}."):
            return name.removeprefix(ROOT).removeprefix(".")
    return ""
