"""Calls of graphs in a model, which are put in the place of the calls, and
torch.utils.checkpoint, which is one: what it marks is computed again in B, but for what
its policy saves (selective activation checkpointing)."""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from ..ir.graphs import draws
from ..ir.lazy import lazy_module
from ..ir.meta import of_node
from ..jobs.job import PlanError

MARK = torch.ops.higher_order.tag_activation_checkpoint
CALLS = {  # of graphs, by the first argument that is one of theirs
    MARK: 1,
    torch.ops.higher_order.wrap: 1,
    torch.ops.higher_order.invoke_subgraph: 2,  # torch.compiler.nested_compile_region
}


SAVING = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class Checkpoint(NamedTuple):
    """A call of torch.utils.checkpoint. policy: says of an operation whether F saves
    what it gives, as in create_selective_checkpoint_contexts; None: of none."""

    number: int
    policy: Callable[..., CheckpointPolicy | bool] | None

    def saves(self, node: fx.Node) -> bool:
        """Whether F saves what a node gives."""
        if self.policy is None:
            return False
        output = of_node(node)["val"]
        given = {"is_recompute": False, "op_output": output}
        known = inspect.signature(SelectiveCheckpointContext).parameters
        context = SelectiveCheckpointContext(**{k: given[k] for k in known})
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: of_node(n)["val"])
        answer = self.policy(context, node.target, *args, **kwargs)
        return answer is True or answer in SAVING


def inline_bodies(gm: fx.GraphModule) -> fx.GraphModule:
    """Dynamo's graph with functions that it calls as graphs in place of their calls;
    nodes of checkpointed ones carry the call, a Checkpoint, as meta["recompute"].

    before: y = tag_activation_checkpoint(body, x); z = y[0]
    after:  h = linear(x, w); z = tanh(h)
    """
    if all(node.target not in CALLS for node in gm.graph.nodes):
        return gm
    inliner = _Inliner()
    result = inliner.copy(gm, {}, None)
    inliner.graph.output(result)
    inliner.graph.output_node().meta = dict(gm.graph.output_node().meta)
    inliner.graph.eliminate_dead_code(lambda node: node.op != "get_attr")
    return lazy_module(inliner.root, inliner.graph)


class _Inliner:
    """Builds the graph; `root` has the tensors and modules that it reads."""

    def __init__(self) -> None:
        self.graph, self.root = fx.Graph(), dict[str, Any]()
        self.regions: Iterator[int] = itertools.count(1)

    def copy(
        self, gm: fx.GraphModule, new: dict[fx.Node, Any], region: Checkpoint | None
    ) -> Any:
        """Copies a graph's nodes, but for inputs that `new` has; gives its output."""
        for node in gm.graph.nodes:
            if node in new:
                continue
            if node.op == "output":
                return fx.map_arg(node.args[0], new.__getitem__)
            if node.op == "get_attr":
                new[node] = self.attribute(gm, node)
            elif node.target in CALLS:
                body, arguments = node.args[0], node.args[CALLS[node.target] :]
                inner = getattr(gm, body.target)
                inputs = inner.graph.find_nodes(op="placeholder")
                values = fx.map_arg(tuple(arguments), new.__getitem__)
                known = dict(zip(inputs, values, strict=True))
                number = region
                if region is None and node.target is MARK:
                    number = Checkpoint(next(self.regions), _policy(inner))
                new[node] = self.copy(inner, known, number)
            elif node.target is operator.getitem and isinstance(
                new[node.args[0]], tuple
            ):
                new[node] = new[node.args[0]][node.args[1]]
            else:
                new[node] = self.graph.node_copy(node, new.__getitem__)
                if region is not None:
                    of_node(new[node])["recompute"] = region
        raise AssertionError("a graph without an output")

    def attribute(self, gm: fx.GraphModule, node: fx.Node) -> fx.Node:
        value = operator.attrgetter(str(node.target))(gm)
        name = str(node.target)
        if self.root.get(name, value) is not value:
            name = f"{name.replace('.', '_')}_{len(self.root)}"
        self.root[name] = value
        copy = self.graph.get_attr(name)
        copy.meta = dict(node.meta)
        return copy


def _policy(body: fx.GraphModule) -> Any:
    """What says which operations of a checkpointed function are saved; of a context_fn
    that doesn't say it, a function that raises PlanError."""
    contexts = body.meta.get("_checkpoint_context_fn")
    if contexts is None:
        return None
    forward, _ = contexts()

    def refuse(*asked: object, **more: object) -> NoReturn:
        raise PlanError(
            f"torch.utils.checkpoint(context_fn=): what {contexts} saves isn't known; "
            "use create_selective_checkpoint_contexts, or leave context_fn out"
        )

    return getattr(forward, "policy_fn", refuse)


def recomputed(graph: fx.Graph) -> dict[fx.Node, None]:
    """Nodes of a joint graph's forward that B computes again rather than keeps.

    Those that a checkpoint marks, but for what others read, which is kept as in eager,
    what draws random numbers, since B would draw others, and what a policy saves.
    """
    nodes: dict[fx.Node, None] = {}
    for node in graph.nodes:
        region = of_node(node).get("recompute")
        if region is None or not is_forward(node) or node.op != "call_function":
            continue
        maker = node.args[0] if node.target is operator.getitem else node
        if draws(maker.target, maker.args, maker.kwargs):
            continue
        if isinstance(region, Checkpoint) and region.saves(maker):
            continue
        users = [user for user in node.users if is_forward(user)]
        if all(of_node(user).get("recompute") == region for user in users):
            nodes[node] = None
    return nodes


def is_forward(node: fx.Node) -> bool:
    """Whether AOTAutograd made a node for the forward."""
    return node.meta.get("partitioner_tag") == "is_forward"
