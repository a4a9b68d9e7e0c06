"""A stage's joint graph, F and B in one, as AOTAutograd traces it, and its rewrites."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import fx

from ..ir import ops
from ..ir.graphs import Spec, base, draws, is_view, result
from ..ir.meta import note, of_node
from ..ir.user_line import line_of
from ..jobs.job import PlanError
from .activation_checkpoints import is_forward, recomputed

What = Literal["state", "input", "output", "tangent", "saved", "carried"]


class Source(NamedTuple):
    """What an argument or a result of a graph is, and which of those."""

    what: What
    number: int


class Joint(NamedTuple):
    """A joint graph: (state..., inputs..., tangents...) -> (outputs..., new state...,
    gradients...). Tangents are the gradients of outputs, as autodiff calls them.

    arguments: what each placeholder is, by its name.
    results: what F gives, outputs and new state.
    gradients: of state or input number i, counted through, or None where there is none.
    """

    gm: fx.GraphModule
    arguments: dict[str, Source]
    results: tuple[Source, ...]
    gradients: tuple[int | None, ...]


def refuse_effects(joint: fx.GraphModule) -> None:
    """Raises PlanError for operations that do more than give values."""
    for node in joint.graph.nodes:
        if getattr(node.target, "__name__", "") == "with_effects":
            raise PlanError(
                f"the model calls {node.args[1]}, which prints, or raises an error for "
                "some values, but a plan can have only calls that compute "
                f"tensors{line_of(node.meta.get('stack_trace'))}\n  leave the call "
                "out, or use a function that only computes, such as the _ex functions "
                "of torch.linalg"
            )


def reshape_views(graph: fx.Graph) -> None:
    """Has views copy where their source has other strides than it was traced with.

    Some operations do: what cat gives of 4 or 5 dimensions may be channels last.

    before: g = cat([a, b], 3); gx = view(g, (24, 4))
    after:  g = cat([a, b], 3); gx = reshape(g, (24, 4))
    """
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        source = base(node)
        known = source.target is not aten.cat.default
        if not (known and of_node(source)["val"].is_contiguous()):
            node.target = aten.reshape.default


def want_captured(gm: fx.GraphModule) -> None:
    """Has FlexAttention's backward give gradients of tensors that its score_mod reads:
    it asks these whether they want one, which nothing does where programs run.

    before: g = flex_attention_backward(q, .., joint, mask, 1., {}, (table,), ())
    after:  t = wanting(table)
            g = flex_attention_backward(q, .., joint, mask, 1., {}, (t,), ())
    """
    flex = torch.ops.higher_order.flex_attention_backward
    for node in gm.graph.find_nodes(op="call_function", target=flex):
        *before, captured, masked = node.args
        given = result(getattr(gm, node.args[8].target))[5 : 5 + len(captured)]
        new = []
        for each, gradient in zip(captured, given, strict=True):
            with gm.graph.inserting_before(node):
                wanted = gradient is not None
                new.append(
                    gm.graph.call_function(ops.wanting, (each,)) if wanted else each
                )
                if wanted:
                    new[-1].meta = {**node.meta, "val": of_node(each)["val"]}
        node.args = (*before, tuple(new), masked)


def recompute_in_backward(joint: Joint) -> None:
    """Computes again in backward what depends on the state alone, such as w.t(), and
    what torch.utils.checkpoint marks.

    before: t = w.t(); y = x @ t; gx = gy @ t.t()
    after:  t = w.t(); y = x @ t; t2 = w.t(); gx = gy @ t2.t()
    """
    graph = joint.gm.graph
    again = _recomputed(joint)
    copies: dict[fx.Node, fx.Node] = {}

    def copied(node: fx.Node, before: fx.Node) -> fx.Node:
        if node.op == "placeholder" or node not in again:
            return node
        if node not in copies:
            for read in node.all_input_nodes:
                copied(read, before)
            with graph.inserting_before(before):
                copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
            copies[node].meta = {**node.meta, "partitioner_tag": "is_backward"}
            note(copies[node], again=True)
        return copies[node]

    for node in list(graph.nodes):
        if node.op == "call_function" and not is_forward(node):
            for read in node.all_input_nodes:
                if read in again:
                    node.replace_input_with(read, copied(read, node))
    for node in graph.nodes:  # the partitioner has a way of its own with it
        of_node(node).pop("recompute", None)
    joint.gm.recompile()


def _recomputed(joint: Joint) -> dict[fx.Node, None]:
    """State, what F computes of it alone without drawing, and what is marked."""
    nodes: dict[fx.Node, None] = {}
    for node in joint.gm.graph.nodes:
        if node.op == "placeholder":
            if joint.arguments[node.name].what == "state":
                nodes[node] = None
        elif node.op == "call_function" and is_forward(node):
            read = node.all_input_nodes
            random = draws(node.target, node.args, node.kwargs)
            if read and not random and all(p in nodes for p in read):
                nodes[node] = None
    return {**nodes, **recomputed(joint.gm.graph)}


def drop_copies(graph: fx.Graph) -> None:
    """Without copies of what nothing else reads, such as dropout's with p=0. A result
    stays a copy of weights, which an update changes.

    before: y = mm(a, b); z = clone(y); return z + x
    after:  y = mm(a, b); return y + x
    """
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.aten.clone.default
    ):
        (source,) = node.all_input_nodes
        if (
            source.op == "call_function"
            and len(source.users) == 1
            and Spec.of(of_node(source)["val"]) == Spec.of(of_node(node)["val"])
            and all(user.op != "output" for user in node.users)
            and not (base(source).op == "placeholder" and _is_result(node))
        ):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _is_result(node: fx.Node) -> bool:
    """Whether a graph returns a value, or a view of it."""
    return any(
        user.op == "output" or (is_view(user.target) and _is_result(user))
        for user in node.users
    )
