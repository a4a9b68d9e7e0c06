"""Splits a stage's backward into the gradients of its inputs and of its weights."""

from __future__ import annotations

import operator

from torch import fx

from ..ir.graphs import Spec, base, result
from ..ir.lazy import lazy_module
from .autograd import Pair


def split_weights(pair: Pair) -> Pair:
    """The pair with its backward split: B gives the gradients of the stage's inputs,
    which others wait for, and what is left of the weights' gradients goes to W.

    before: gx = gy @ w; t = gy.t(); gw = t @ x; return (gx, gw)
    after:  B: gx = gy @ w; return (gx, gy, x)      W: t = gy.t(); gw = t @ x

    Zero Bubble Pipeline Parallelism (Qi et al. 2023, arXiv 2401.10241). A stage whose
    inputs have no gradients, as the first, keeps in B what two or more gradients of
    weights depend on. Where no weight has a gradient there is no W.
    """
    if pair.backward is None or not pair.state_gradients:
        return pair
    graph = pair.backward.graph
    count = len(pair.input_gradients)
    given = list(result(pair.backward))
    inputs, weights = given[:count], given[count:]
    early = _early(graph, inputs, weights)
    state = {
        node: i
        for node, (what, i) in zip(
            graph.find_nodes(op="placeholder"), pair.needs, strict=True
        )
        if what == "state"
    }
    late = [n for n in graph.nodes if n.op == "call_function" and n not in early]
    read = [p for n in late for p in n.all_input_nodes]
    inside = set(late)
    outside = [n for n in (*read, *weights) if n not in inside]
    carried = list(dict.fromkeys(n for n in outside if n not in state))
    wanted = list(dict.fromkeys(n for n in outside if n in state))
    backward, weight = fx.Graph(), fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node in early:
            new[node] = backward.node_copy(node, new.__getitem__)
    backward.output(tuple(new[n] for n in (*inputs, *carried)))
    needs = []
    for node, need in zip(
        backward.find_nodes(op="placeholder"), pair.needs, strict=True
    ):
        if node.users:
            needs.append(need)
        else:
            backward.erase_node(node)
    new = {}
    for node in (*wanted, *carried):
        new[node] = weight.placeholder(node.name)
        new[node].meta = dict(node.meta)
    for node in late:
        new[node] = weight.node_copy(node, new.__getitem__)
    weight.output(tuple(new[n] for n in weights))
    later = [("state", state[n]) for n in wanted]
    later += [("carried", k) for k in range(len(carried))]
    return pair._replace(
        backward=lazy_module(pair.backward, backward),
        needs=tuple(needs),
        weight=lazy_module(pair.backward, weight),
        weight_needs=tuple(later),
        carried=tuple(Spec.of(n.meta["val"]) for n in carried),
        carried_bytes=sum(
            Spec.of(root.meta["val"]).bytes
            for root in dict.fromkeys(map(base, carried))
        ),
    )


def _early(
    graph: fx.Graph, inputs: list[fx.Node], weights: list[fx.Node]
) -> set[fx.Node]:
    """The nodes that stay in B."""
    leads: dict[fx.Node, set[fx.Node]] = {}  # to which gradients of weights
    early: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        leads[node] = {w for user in node.users for w in leads.get(user, ())}
        if node in weights:
            leads[node].add(node)
        shared = not inputs and len(leads[node]) > 1
        if node in inputs or shared or any(user in early for user in node.users):
            early.add(node)
    for node in graph.nodes:  # a tuple's parts are taken where it is made
        if node.target is operator.getitem and node.all_input_nodes[0] in early:
            early.add(node)
    return early
